"""Turns text into token files and batches.

Import from the leaf modules: ``halfstep.trainer.data.config`` (the configuration), ``corpus``
(corpus to token files, once, cached), ``labelled`` and ``instructions`` (records), and ``batches``
(pure functions of the seed and the step, so there is no loader state to save).
"""
