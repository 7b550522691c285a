"""Statistics of a step's tensors, and where the steps of anybody's loop begin and end."""
