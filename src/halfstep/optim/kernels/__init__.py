"""Kernels that take one optimizer step on many tensors; all give the same bits."""
