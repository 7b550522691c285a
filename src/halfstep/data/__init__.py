"""Text goes in, token files and batches come out.

Import from the leaf modules: ``halfstep.data.config`` (what the user asks for),
``halfstep.data.prepare`` (corpus to token files, once, cached) and ``halfstep.data.batches``
(``batch(step, sequences)`` as a pure function, so there is no loader state to save).
"""
