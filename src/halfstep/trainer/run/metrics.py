"""Feeds loggers besides metrics.jsonl, for runs that ask for them."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from halfstep.diagnostics.metrics import Record
from halfstep.errors import ConfigError


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


SINKS: Mapping[str, Callable[[Path, int], MetricsSink]] = {
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
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"run.report_to={name} needs the package {name}, which is not installed: pip "
                f"install {name}"
            )
