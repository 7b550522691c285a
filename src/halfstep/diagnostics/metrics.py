"""Writes metrics.jsonl, one JSON object per optimizer step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.files import write_whole
from halfstep.precision.result import StepResult

METRICS, CAUSES, NUMERICS = "metrics.jsonl", "causes.jsonl", "numerics.jsonl"
HEALTH = "health.jsonl"
CAPTURES = "captures"


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

    def to_json(self) -> str:
        """Format the record as one line of strict JSON, without absent values."""
        kept = {}
        for key in _FIELDS:
            value = getattr(self, key)
            if isinstance(value, float) and not math.isfinite(value):
                value = str(value)
            if value is not None:
                kept[key] = value
        return json.dumps(kept)


_FIELDS = tuple(field.name for field in dataclasses.fields(Record))


class MetricsFile:
    """Appends records to the file, unbuffered, so that a killed process loses no written line."""

    def __init__(self, path: Path, keep_until_step: int) -> None:
        """Open the file for appending, dropping the records that a resumed run will write again.

        Args:
            path: The file; made if absent.
            keep_until_step: Records of later steps, and a torn last line, are dropped.

        Raises:
            CheckpointError: If it cannot be written; :meth:`write` raises the same.
        """
        self._path = path
        try:
            if path.exists():
                keep_lines(path, keep_until_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error}") from error

    def write(self, record: Record) -> None:
        """Append one record and hand it to the operating system."""
        try:
            self._file.write((record.to_json() + "\n").encode())
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {error}") from error

    def close(self) -> None:
        """Close ``metrics.jsonl``; nothing can be written afterwards."""
        self._file.close()


def keep_lines(path: Path, last_step: int) -> None:
    """Drop torn lines, and those of later steps, from a file with one JSON object a line.

    Raises:
        CheckpointError: If it cannot be written; it is as it was then.
    """
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    try:
        write_whole(path, "".join(kept))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a JSON object to a file with one a line.

    Raises:
        CheckpointError: If it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
