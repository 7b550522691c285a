"""Statistics of the tensors of a training step, and what other formats would make of them."""
