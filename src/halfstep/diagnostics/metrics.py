"""The files of a run with one JSON object a line, and a step's line of ``metrics.jsonl``."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import StorageError
from halfstep.files import write_whole
from halfstep.precision.result import StepResult

METRICS, CAUSES, NUMERICS = "metrics.jsonl", "causes.jsonl", "numerics.jsonl"
HEALTH = "health.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step's line of ``metrics.jsonl``; None is left out.

    JSON has no NaN: it is written as the string ``"nan"``, infinities as ``"inf"`` and ``"-inf"``,
    which ``float()`` reads in Python, NumPy and pandas (docs/decisions/0017-first-cause.md).
    """

    step: int
    """Number of the step, from 1; skipped steps count."""
    applied: bool
    """Whether the weights were updated."""
    loss: float | None = None
    """Training loss before the step, in nats per target (token, or a classifier's example)."""
    val_loss: float | None = None
    """Validation loss after the step, nats per target."""
    val_accuracy: float | None = None
    """For a classifier: share of the validation examples whose class was predicted."""
    val_macro_f1: float | None = None
    """For a classifier: unweighted mean of the F1 score of each class."""
    val_measures: dict[str, float] | None = None
    """Further values that the user's own function measured on the validation data, by name."""
    learning_rate: float | None = None
    """Learning rate of the step."""
    grad_norm: float | None = None
    """Global gradient norm, unscaled, before clipping."""
    loss_scale: float | None = None
    """Loss scale that the gradients were multiplied by."""
    skip_reason: str | None = None
    """Why the step was skipped."""
    first_cause: str | None = None
    """The operation that made its first NaN or infinity, in a line; ``causes.jsonl`` has it all."""
    lost_updates: dict[str, float] | None = None
    """On steps that the lost-update meter measured: parameter group to the share of its updates
    that rounding swallowed for good, leaving the stored weight as it was."""
    calibrating: bool | None = None
    """True while a dynamic loss scale searches for its level; skips are expected then."""
    skipped_total: int | None = None
    """Skipped steps so far."""
    tokens: int | None = None
    """Tokens trained on so far, without padding, skipped steps included."""
    tokens_per_second: float | None = None
    """Tokens over the seconds of this step: data, forward, backward and update."""
    peak_memory_bytes: int | None = None
    """CUDA: peak memory held by tensors. CPU: peak resident size of the process so far."""

    @classmethod
    def of(cls, step: int, result: StepResult, **more: Any) -> Record:
        """The record of a step that was taken or skipped, with what else is known of it."""
        return cls(
            step=step,
            applied=result.applied,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            skip_reason=result.reason,
            calibrating=result.calibrating or None,
            skipped_total=result.skipped_total,
            **more,
        )

    def line(self) -> dict[str, Any]:
        """What is known, as values that JSON has."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in known.items()
        }


_UNWRITTEN: dict[Path, bytes] = {}
"""Lines that wait for their file to take them."""


def keep_lines(path: Path, last_step: int) -> None:
    """Begin a file with one JSON object a line, or drop its torn lines and those of later steps.

    Raises:
        StorageError: If it cannot be written; it is as it was then.
    """
    kept = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in lines.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] <= last_step:
                    kept.append(line + "\n")
        write_whole(path, "".join(kept))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def append_line(path: Path, line: Mapping[str, Any], *, last: bool = False) -> None:
    """Append a JSON object and close the file, so that a killed process loses no written line.

    What cannot be written is kept for the next call, with a warning, or lost if it is the last.
    """
    left = _UNWRITTEN.pop(path, b"") + (json.dumps(line).encode() + b"\n" if line else b"")
    try:
        with path.open("ab", buffering=0) as out:
            while left:
                left = left[out.write(left) :]
    except OSError as error:
        if not last:
            _UNWRITTEN[path] = left
        what = "lost" if last else "kept for later"
        warnings.warn(f"{path}: {error}; its lines are {what}", stacklevel=2)


@atexit.register
def write_waiting(folder: Path | None = None) -> None:
    """Write the lines that wait for files of a run's folder, at its end; or all, as Python ends."""
    for path in [path for path in _UNWRITTEN if folder in (None, path.parent)]:
        append_line(path, {}, last=True)
