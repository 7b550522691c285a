"""Master weights: how they are kept, how gradients reach them, and how they are rounded."""
