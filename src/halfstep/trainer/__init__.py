"""The trainer behind ``halfstep train``, ``halfstep finetune`` and :class:`halfstep.Trainer`."""

from __future__ import annotations

import importlib
from typing import Any


def part(place: str) -> Any:
    """Return what a place in this package names, such as ``"trainer.tasks.lm:LMTask"``.

    It is imported only now: many runs do without, such as another task's models and data.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"halfstep.{module}"), name)
