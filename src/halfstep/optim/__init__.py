"""Optimizers over low-precision weights and moments: AdamW, SGD, Lion, Muon and Adafactor."""

from halfstep.optim.adafactor import Adafactor
from halfstep.optim.muon import Muon, muon_groups
from halfstep.optim.optimizers import SGD, AdamW, Lion

__all__ = ["SGD", "Adafactor", "AdamW", "Lion", "Muon", "muon_groups"]
