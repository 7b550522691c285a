"""Optimizers over low-precision weights and moments: AdamW, SGD with momentum, Lion."""

from halfstep.optim.optimizers import SGD, AdamW, Lion

__all__ = ["SGD", "AdamW", "Lion"]
