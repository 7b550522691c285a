"""The models that the trainer makes or loads; each has ``loss_sum(batch)`` and ``blocks()``."""
