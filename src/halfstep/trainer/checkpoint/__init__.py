"""Checkpoints: which pieces ranks hold, how they are written, committed and read."""
