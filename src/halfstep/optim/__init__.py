"""Optimizers over low-precision weights and moments: AdamW, SGD, Lion and Muon."""

from halfstep.optim.muon import Muon, muon_groups
from halfstep.optim.optimizers import SGD, AdamW, Lion

__all__ = ["SGD", "AdamW", "Lion", "Muon", "muon_groups"]
