"""What mixed precision does to the results: sums, training below and at 16 bits."""
