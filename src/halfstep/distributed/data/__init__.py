"""Data parallelism: every rank has the whole model and a share of the batch."""
