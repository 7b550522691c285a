"""Turns text into token files and batches.

Import from the leaf modules: ``halfstep.trainer.data.config`` (the configuration),
``corpus.prepare`` (corpus to token files, once, cached) and ``corpus.batches``
(``batch(step, sequences)`` as a pure function, so there is no loader state to save).
"""
