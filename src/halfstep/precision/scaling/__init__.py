"""Loss scaling: how the scale moves, where it starts, and what it protects."""
