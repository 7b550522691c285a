"""Two runs side by side: what each step computed, kept as sketches, and where they part."""
