"""Reads how far a saved run had come from its ``state.json``, validating every value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

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
    """The trainer's own part of a checkpoint's state, validated."""

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
    """Read the trainer's part of a checkpoint's state, checking the type of every value.

    Args:
        state: The checkpoint's state, whatever it holds.
        where: The checkpoint's folder, for messages.

    Raises:
        CheckpointError: Naming the key.
    """
    step, tokens = (_count(state, key, where) for key in ("step", "tokens"))
    precision = _table(state, "precision", where)
    if not isinstance(precision.get("policy"), str):
        _refuse(where, "precision.policy", precision.get("policy"), "a policy")
    best = _best(_table(state, "best", where), where) if "best" in state else None
    updates = _count({"ema_updates": 0, **state}, "ema_updates", where)
    made_with = _table(state, "made_with", where)
    return SavedProgress(step, tokens, precision, best, made_with, updates)


def _best(saved: dict[str, Any], where: Path) -> Best:
    found = _table(saved, "evaluation", where, "best.")
    known = {field.name for field in fields(Evaluation)}
    if not {"loss", "targets", "score", "text"} <= set(found) <= known:
        _refuse(where, "best.evaluation", sorted(found), f"the keys {', '.join(sorted(known))}")
    for key in ("loss", "score"):
        _number(found, key, where, "best.evaluation.")
    for key in ("bits_per_byte", "accuracy", "macro_f1"):
        if found.get(key) is not None:
            _number(found, key, where, "best.evaluation.")
    for key in _table({"measures": {}, **found}, "measures", where, "best.evaluation."):
        _number(found["measures"], key, where, "best.evaluation.measures.")
    _count(found, "targets", where, "best.evaluation.")
    if not isinstance(found["text"], str):
        _refuse(where, "best.evaluation.text", found["text"], "text")
    rows = found.get("confusion", [])
    plain = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == len(rows) and all(map(_is_count, row)) for row in rows
    )
    if not plain:
        _refuse(where, "best.evaluation.confusion", rows, "a square table of counts")
    table = tuple(tuple(row) for row in rows)
    since = {"evaluations_since": 0, **saved}
    return Best(
        _count(saved, "step", where, "best."),
        _number(saved, "score", where, "best."),
        Evaluation(**{**found, "confusion": table}),
        _count(since, "evaluations_since", where, "best."),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _count(values: Mapping[str, Any], key: str, where: Path, inside: str = "") -> int:
    value: Any = values.get(key)
    if not _is_count(value):
        _refuse(where, inside + key, value, "a count")
    return int(value)


def _number(values: Mapping[str, Any], key: str, where: Path, inside: str = "") -> float:
    """Return a number, or raise. NaN is allowed: it is the loss of a diverged model."""
    value: Any = values.get(key)
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or (isinstance(value, int) and abs(value) > math.floor(1e300)):
        _refuse(where, inside + key, value, "a number")
    return float(value)


def _table(values: Mapping[str, Any], key: str, where: Path, inside: str = "") -> dict[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        _refuse(where, inside + key, value, "a table")
    return dict(value)


def _refuse(where: Path, key: str, value: Any, wanted: str) -> NoReturn:
    try:
        found = "missing" if value is None else repr(value)[:60]
    except ValueError:  # Python refuses to print an int of that many digits
        found = "a number of more than 4,300 digits"
    raise CheckpointError(
        f"{where}: {key} in its state is {found}, not {wanted}: the checkpoint is damaged or "
        "foreign. Remove it to go on from the one before"
    )
