"""Weights that lose nothing: masters, how gradients reach them, and exact rounding."""
