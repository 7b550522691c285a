"""Kernels that take one optimizer step on many tensors, on a CPU or a GPU."""
