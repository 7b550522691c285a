"""Where the first NaN or infinity was made."""
