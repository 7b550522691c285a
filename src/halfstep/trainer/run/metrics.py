"""metrics.jsonl: one JSON object per optimizer step, appended as it happens."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from halfstep.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one step leaves in ``metrics.jsonl``; a None or non-finite value is left out."""

    step: int
    """Number of the step, from 1; skipped steps count."""
    applied: bool
    """Whether the weights were updated."""
    loss: float | None = None
    """Training loss before the step, nats per target: token, or example of a classifier."""
    val_loss: float | None = None
    """Validation loss after the step, nats per target."""
    val_accuracy: float | None = None
    """Of a classifier: share of the validation examples whose class was found."""
    val_macro_f1: float | None = None
    """Of a classifier: mean of the classes' F1."""
    learning_rate: float | None = None
    """Learning rate of the step."""
    grad_norm: float | None = None
    """Global gradient norm, unscaled, before clipping."""
    loss_scale: float | None = None
    """Scale that the gradients carried."""
    skip_reason: str | None = None
    """Why the step was skipped."""
    lost_updates: dict[str, float] | None = None
    """On steps that the lost-update meter measured: parameter group to its share of updates that
    left the stored weight as it was for good."""
    frozen_below: dict[str, float] | None = None
    """On the same steps: parameter group to the learning rate below which half of its updates would
    be lost."""
    calibrating: bool | None = None
    """True while a dynamic scale looks for its level; a skip is expected then."""
    rolled_back: bool | None = None
    """True if the weights went back to an earlier step's."""
    skipped_total: int | None = None
    """Skipped steps so far."""
    sent_bytes: int | None = None
    """With several ranks: bytes that each sends for gradients and parameters in a step."""
    sent_bytes_fp32: int | None = None
    """What it would send if all of it travelled in fp32."""
    tokens: int | None = None
    """Tokens trained on so far, without padding, skipped steps included."""
    tokens_per_second: float | None = None
    """Of this step: data, forward, backward and update."""
    flops_per_second: float | None = None
    """Model arithmetic of this step over its seconds: of a GPT (6 N + 12 L C T) per token, of a
    fine-tuned model 6 (LoRA: 4) per matrix weight and token."""
    gemm_share: float | None = None
    """flops_per_second as a share of the matrix-product rate measured when the run started."""
    peak_memory_bytes: int | None = None
    """CUDA: most memory held by tensors. CPU: largest resident size of the process so far."""

    def to_json(self) -> str:
        """One line of JSON without absent values."""
        kept = {
            key: value
            for key, value in asdict(self).items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }
        return json.dumps(kept)


class MetricsFile:
    """Appends records; every line is complete on disk's side of the process at once."""

    def __init__(self, path: Path, keep_until_step: int) -> None:
        """Open for appending, dropping what a resumed run will write again.

        Args:
            path: The file; made if absent.
            keep_until_step: Records of later steps, and a torn last line, are dropped.

        Raises:
            CheckpointError: If it cannot be written; so does :meth:`write`.
        """
        self._path = path
        try:
            if path.exists():
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(_kept(path, keep_until_step)), encoding="utf-8")
                os.replace(temporary, path)
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


class NoMetrics:
    """The null object: of ranks that do not write."""

    def write(self, record: Record) -> None:
        """Write nothing: rank 0 does."""

    def close(self) -> None:
        """Close nothing: no file is open."""


def _kept(path: Path, last_step: int) -> list[str]:
    """The whole lines of a metrics file up to a step."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return kept


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: most memory held by tensors since the start; CPU: peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # Linux hands ru_maxrss down from the process that started this one
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS gives bytes, Linux KiB


# Metrics to TensorBoard, for runs that ask for it.


class MetricsSink(Protocol):
    """Where records go besides ``metrics.jsonl``."""

    def write(self, record: Record) -> None:
        """Take one step's record."""

    def close(self) -> None:
        """Write out what is buffered, and take no more."""


class NoSink:
    """The null object: records go to ``metrics.jsonl`` alone."""

    def write(self, record: Record) -> None:
        """Pass over the record: nobody asked for it."""

    def close(self) -> None:
        """Close nothing: no writer is open."""


class TensorBoardSink:
    """Scalars under their metrics.jsonl names, by step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open a writer; steps from ``first_step`` on replace those of an earlier process."""
        # An optional dependency, the extra "tensorboard"; require_sink has asked for it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, record: Record) -> None:
        """Write every finite number of the record."""
        for key, value in dataclasses.asdict(record).items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(key, float(value), record.step)

    def close(self) -> None:
        """Write out what is buffered, and close the writer."""
        self._writer.close()


def require_sink(report_to: str) -> None:
    """Refuse a sink whose package is missing, before any work is done.

    Raises:
        ConfigError: With what to install.
    """
    if report_to == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "run.report_to=tensorboard needs the package tensorboard: pip install "
            "'halfstep[tensorboard]'"
        )


def open_sink(report_to: str, folder: Path, first_step: int) -> MetricsSink:
    """The sink that ``run.report_to`` names."""
    if report_to == "tensorboard":
        return TensorBoardSink(folder / "tensorboard", first_step)
    return NoSink()
