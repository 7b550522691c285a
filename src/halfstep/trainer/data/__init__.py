"""Turns text into token files and batches."""
