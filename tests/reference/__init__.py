"""Oracles: what the right answer is, from definitions, in NumPy and fp64; nothing of halfstep."""
