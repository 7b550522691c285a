"""Optimizers over low-precision weights and moments."""
