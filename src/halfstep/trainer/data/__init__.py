"""Text goes in, token files and batches come out.

Import from the leaf modules: ``halfstep.trainer.data.config`` (what the user asks for),
``corpus.prepare`` (corpus to token files, once, cached) and ``corpus.batches``
(``batch(step, sequences)`` as a pure function, so there is no loader state to save).
"""
