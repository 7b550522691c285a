"""The command ``halfstep export``."""

from __future__ import annotations

from halfstep.trainer.config.use import Exporting
from halfstep.trainer.tasks.trained import open_trained


def run(arguments: Exporting) -> int:
    """Write a run's model, with its tokenizer, as a Hugging Face folder."""
    print(open_trained(arguments).export(arguments))
    return 0
