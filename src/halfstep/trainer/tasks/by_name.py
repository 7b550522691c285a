"""Imports the parts of a run that many runs do without, such as another task's models and data.

A plain ``halfstep train`` imports half of the trainer so. What is imported is written in this
package, never in a configuration.
"""

from __future__ import annotations

import importlib
from typing import Any


def part(place: str) -> Any:
    """Return what a place names, such as ``"trainer.tasks.lm:LMTask"``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"halfstep.{module}"), name)
