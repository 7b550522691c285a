"""Training: configuration, the step, the loop, evaluation, checkpoints and metrics."""
