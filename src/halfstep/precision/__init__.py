"""The precision library: knows torch, knows nothing of training."""
