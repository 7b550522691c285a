"""One optimizer step of many tensors, on a CPU and on a GPU."""
