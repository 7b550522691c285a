"""Lists the public names of halfstep.optim; each is loaded on first use."""

from .muon import Muon as Muon, muon_groups as muon_groups
from .optimizers import SGD as SGD, AdamW as AdamW, Lion as Lion
