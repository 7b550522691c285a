"""Reads how far a saved run had come from its ``state.json``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.trainer.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    score: float
    evaluation: Evaluation
    evaluations_since: int = 0
    """Number of evaluations since then, none of them better."""


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """The trainer's own part of a checkpoint's state."""

    step: int
    tokens: int
    precision: dict[str, Any]
    """Argument of :meth:`Precision.load_state_dict`, which checks it."""
    best: Best | None
    made_with: dict[str, str]
    """Names and hashes of the data, tokenizer and models that the run read."""
    ema_updates: int
    """Number of updates of the weights' moving average; 0 where there is none."""


def read_progress(state: Mapping[str, Any], where: Path) -> SavedProgress:
    """Read the trainer's part of a checkpoint's state.

    The checkpoint's hashes have shown that it is as it was written; what is checked here is that
    the trainer wrote it.

    Raises:
        CheckpointError: If a value is missing or of another kind.
    """
    try:
        best = dict(state["best"]) if "best" in state else None
        if best is not None:
            found = dict(best["evaluation"])
            rows = tuple(tuple(map(operator.index, row)) for row in found.get("confusion", ()))
            best["evaluation"] = Evaluation(**{**found, "confusion": rows})
            best["step"], best["score"] = operator.index(best["step"]), float(best["score"])
        return SavedProgress(
            operator.index(state["step"]),
            operator.index(state["tokens"]),
            dict(state["precision"]),
            None if best is None else Best(**best),
            dict(state["made_with"]),
            operator.index(state.get("ema_updates", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: its state is damaged or foreign ({error!r:.80}). Remove it to go on from "
            "the one before"
        ) from error
