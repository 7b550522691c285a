"""Checkpoints: which pieces the ranks hold, and how these are written, committed and read."""
