"""Mistakes of precision in other people's training scripts, which are read and never run."""
