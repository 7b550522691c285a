"""Read-only diagnostics of numerics in training: they do not change a bit of the results."""
