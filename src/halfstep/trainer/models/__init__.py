"""Plain torch models; each gives ``loss_sum(batch)``, ``tp_plan()`` and ``blocks()``."""
