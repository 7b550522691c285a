"""Writes metrics.jsonl, one JSON object per optimizer step, and feeds other loggers."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import write_whole


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
    frozen_below: dict[str, float] | None = None
    """On the same steps: parameter group to the learning rate below which half of its updates would
    be lost."""
    calibrating: bool | None = None
    """True while a dynamic loss scale searches for its level; skips are expected then."""
    rolled_back: bool | None = None
    """True if the weights were rolled back to those of an earlier step."""
    skipped_total: int | None = None
    """Skipped steps so far."""
    sent_bytes: int | None = None
    """With several ranks: bytes that each sends for gradients and parameters in a step."""
    sent_bytes_fp32: int | None = None
    """The bytes that each rank would send if all of it travelled in fp32."""
    tokens: int | None = None
    """Tokens trained on so far, without padding, skipped steps included."""
    tokens_per_second: float | None = None
    """Tokens over the seconds of this step: data, forward, backward and update."""
    flops_per_second: float | None = None
    """Model arithmetic of this step over its seconds: (6 N + 12 L C T) per token for a GPT; 6
    (LoRA: 4) per matrix weight and token for a fine-tuned model."""
    gemm_share: float | None = None
    """flops_per_second as a share of the matrix-product rate measured when the run started."""
    peak_memory_bytes: int | None = None
    """CUDA: peak memory held by tensors. CPU: peak resident size of the process so far. Of a moment
    up to a tenth of a second before the step's end."""

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


def keep_lines(path: Path, last_step: int, key: str = "step") -> None:
    """Drop torn lines, and those of later steps, from a file with one JSON object a line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)[key] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    write_whole(path, "".join(kept))


class PeakMemory:
    """The peak memory so far, which it takes the system longer to tell than the trainer a line."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes, self._asked = 0, -math.inf

    def bytes(self) -> int:
        """Return the peak as the system told it last, at most a tenth of a second ago."""
        now = time.monotonic()
        if now - self._asked > 0.1:
            self._bytes, self._asked = peak_memory_bytes(self._device), now
        return self._bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: of tensors on CUDA, the process's resident size on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # not getrusage: on Linux its ru_maxrss is inherited from the parent process
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS gives bytes, Linux KiB


# Loggers besides metrics.jsonl, for runs that ask for them.


class MetricsSink(Protocol):
    """Protocol of a logger besides ``metrics.jsonl``; users can pass objects of their own."""

    def write(self, record: Record) -> None:
        """Log the record of one step."""

    def close(self) -> None:
        """Flush what is buffered; no record follows."""


def numbers_of(record: Record) -> dict[str, float]:
    """Return a record's finite numbers except ``step``; those of dicts are named ``key/group``."""
    found: dict[str, float] = {}
    for key, value in asdict(record).items():
        parts = {f"{key}/{n}": v for n, v in value.items()} if isinstance(value, dict) else {}
        for name, number in (parts or {key: value}).items():
            if isinstance(number, int | float) and math.isfinite(number) and key != "step":
                found[name] = float(number)
    return found


class CSVSink:
    """Writes ``metrics.csv``: one row per step, one column per field of Record but its dicts."""

    COLUMNS = tuple(f.name for f in dataclasses.fields(Record) if "dict" not in str(f.type))

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open the file; rows from ``first_step`` on are dropped, as they will be written again."""
        path = folder / "metrics.csv"
        kept: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                kept = [row for row in rows if (row["step"] or "").isdecimal()]
        self._file = path.open("w", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, self.COLUMNS, extrasaction="ignore")
        self._rows.writeheader()
        self._rows.writerows(row for row in kept if int(row["step"]) < first_step)

    def write(self, record: Record) -> None:
        """Append a row; fields that the step does not have stay empty."""
        self._rows.writerow(json.loads(record.to_json()))
        self._file.flush()

    def close(self) -> None:
        """Close ``metrics.csv``; no row can follow."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Tracker:
    """Passes the finite numbers of each record on to an experiment tracker's package."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[], object]

    def write(self, record: Record) -> None:
        """Log the record's numbers under its step."""
        self.log(numbers_of(record), record.step)

    def close(self) -> None:
        """Send what is buffered, and end the tracker's run."""
        self.finish()


def _tensorboard(folder: Path, first_step: int) -> Tracker:
    """Log scalars by their metrics.jsonl names; steps replace those of an earlier process."""
    # Imported here as it is an optional dependency; require_sinks has checked for it.
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    return Tracker(log, writer.close)


def _wandb(folder: Path, first_step: int) -> Tracker:
    """Open or resume a wandb run whose id is a hash of the folder; ``wandb login`` says where."""
    import wandb

    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "halfstep"), name=folder.name, id=name,
        dir=str(folder), resume="allow",
    )  # fmt: skip
    return Tracker(lambda numbers, step: run.log(numbers, step=step), run.finish)


def _mlflow(folder: Path, first_step: int) -> Tracker:
    """Start an MLflow run at the server that MLflow's own ``MLFLOW_TRACKING_URI`` names."""
    import mlflow

    mlflow.start_run(run_name=folder.name)
    return Tracker(lambda numbers, step: mlflow.log_metrics(numbers, step=step), mlflow.end_run)


SINKS: Mapping[str, Callable[[Path, int], MetricsSink]] = {
    "csv": CSVSink,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
"""Name allowed in ``run.report_to`` to the function that opens that logger."""


def require_sinks(names: Sequence[str]) -> None:
    """Refuse a sink whose package is missing, before any work is done.

    Raises:
        ConfigError: With what to install.
    """
    for name in names:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"run.report_to={name} needs the package {name}, which is not installed: pip "
                f"install {name}"
            )
