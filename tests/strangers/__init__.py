"""Training as it is written elsewhere, run under every policy beside plain fp32 torch."""
