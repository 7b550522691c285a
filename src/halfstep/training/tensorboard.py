"""Metrics to TensorBoard, for runs that ask for it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any, Protocol

from halfstep.errors import ConfigError
from halfstep.training.metrics import Record


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
