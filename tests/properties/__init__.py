"""Laws that hold for every input, tried on random ones (Hypothesis)."""
