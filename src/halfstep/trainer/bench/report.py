"""What a measurement of policies found: figures, a recommendation with its reason, and a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

import numpy as np
import torch

from halfstep.diagnostics.lost_updates.report import LOUD, lost_share
from halfstep.files import write_whole
from halfstep.trainer.bench.turns import LEAST, Row
from halfstep.words import Phrase, Told, phrase_of, spoken

_told = Told("halfstep.trainer.bench")
_BETWEEN = {"en": " ", "zh": ""}
"""What stands between two sentences."""


class Quartiles(NamedTuple):
    """A quarter of the values is below ``low``, half below ``median``, three quarters ``high``."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Compute them, by interpolation between the values; one value is all three."""
        if len(values) < 2:
            return cls(*(list(values) * 3))
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(low, middle, high)


@dataclass(frozen=True)
class BenchReport:
    """The rows of a measurement, and what follows from them."""

    rows: Sequence[Row]
    name: str
    """The configuration's."""
    unit: str
    """``tokens`` or ``examples``."""
    device: str
    memory_bytes: int
    """What the device has."""
    together: bool
    """Whether all rows took turns with each other."""
    seconds: float
    """How long it took."""
    synthetic: bool
    """Whether the data was synthetic."""

    @cached_property
    def measured(self) -> list[Row]:
        """The rows that can be compared."""
        return [row for row in self.rows if not row.why_not]

    @property
    def reference(self) -> Row | None:
        """The row that others are compared with: the first, fp32 where it was asked for."""
        return self.measured[0] if self.measured else None

    @property
    def steps(self) -> int:
        """Steps that every measured row took, over which losses are compared."""
        return min((len(row.steps) for row in self.measured), default=0)

    @property
    def timed(self) -> int:
        """Steps whose times count, in the row that has fewest."""
        return min((len(row.timed) for row in self.measured), default=0)

    @property
    def _tail(self) -> slice:
        return slice(self.steps - max(1, self.steps // 4), self.steps)

    def seconds_of(self, row: Row) -> Quartiles:
        """Return the seconds of a step."""
        return Quartiles.of([step.seconds for step in row.timed or row.steps[-1:]])

    def rate(self, row: Row) -> Quartiles:
        """Return units per second, over the steps whose times count."""
        return Quartiles.of(
            [
                (step.tokens if self.unit == "tokens" else step.rows) / step.seconds
                for step in row.timed or row.steps[-1:]
            ]
        )

    def loss(self, row: Row) -> float:
        """Return the mean training loss of the last quarter of the steps that all rows took."""
        return fmean(step.loss for step in row.steps[self._tail])

    def lost(self, row: Row) -> float:
        """Return the share of updates that rounding swallowed, or NaN."""
        rate = 1.0  # the peak: steps are measured after the warm-up, and nothing decays
        return lost_share(((rate, s.lost) for s in row.steps if s.lost is not None), rate)

    @property
    def noise(self) -> float:
        """How far two runs of the reference on other batches would differ: two standard errors.

        The difference of two means of n losses has 2 / n times the variance of one, which is, about
        whatever slope, a sixth of the mean square of the losses' second differences. **Source:**
        Gasser, Sroka and Jennen-Steinmetz, "Residual variance and residual pattern in nonlinear
        regression", Biometrika 1986.
        """
        if self.reference is None or self.steps < 5:
            return math.nan
        losses = [step.loss for step in self.reference.steps[self.steps // 2 : self.steps]]
        variance = float(np.square(np.diff(losses, 2)).mean()) / 6
        return 2 * math.sqrt(2 * variance / (self._tail.stop - self._tail.start))

    @property
    def learned(self) -> float:
        """How far the reference's loss fell."""
        return self.reference.steps[0].loss - self.loss(self.reference) if self.reference else 0.0

    @property
    def threads(self) -> int:
        """Threads that each row computed with."""
        return int(self.reference.opened["threads"]) if self.reference else 0

    @property
    def where(self) -> Phrase:
        """Name the device and the number of threads."""
        known = {"device": self.device, "threads": self.threads}
        one = self.threads == 1
        return _told.phrase("where_one", **known) if one else _told.phrase("where", **known)

    def against(self, row: Row) -> str:
        """Say what speaks against a row, compared with the reference; empty for nothing."""
        reference = self.reference
        assert reference is not None
        loss, best = self.loss(row), self.loss(reference)
        if not math.isfinite(loss):
            return _told.phrase("loss_not_finite")
        if loss - best > self.noise:
            return _told.phrase("loss_higher", more=loss - best)
        if self.lost(row) > max(LOUD, self.lost(reference)):
            return _told.phrase("lost", share=self.lost(row))
        if math.isnan(self.lost(row)) and row.policy.master_dtype != torch.float32:
            return _told.phrase("lost_unknown")
        peak = row.steps[-1].peak_memory_bytes
        return _told.phrase("too_large", size=peak / 1e9) if peak > self.memory_bytes else ""

    @property
    def best(self) -> Row | None:
        """The fastest row that nothing speaks against."""
        fit = [row for row in self.measured if not self.against(row)]
        return max(fit, key=lambda row: self.rate(row).median, default=None)

    def recommendation(self) -> Phrase:
        """Say in a sentence which policy to take and why, and in others what limits that."""
        return phrase_of(lambda: _BETWEEN[spoken()].join(self._recommended()))

    def _recommended(self) -> list[str]:
        best, reference = self.best, self.reference
        if reference is None:
            return [_told("none_measured")]
        if best is None or self.against(reference):
            why = self.against(reference)
            return [_told("no_measure", policy=str(reference.policy), why=why)]
        if math.isnan(self.noise):
            return [_told("few_steps", steps=self.steps), *self.doubts()]
        text = _told("take_reference", policy=str(best.policy))
        if best is not reference:
            text = _told(
                "take",
                policy=str(best.policy),
                reference=str(reference.policy),
                times=self.rate(best).median / self.rate(reference).median,
                unit=_told(f"unit {self.unit}"),
                loss=self.loss(best),
                base=self.loss(reference),
                noise=self.noise,
                memory=best.steps[-1].peak_memory_bytes / 1e6,
                whole=self.memory_bytes / 1e9,
            )
        return [text, *self._faster(best), *self._leaner(best), *self.doubts()]

    def _faster(self, best: Row) -> list[str]:
        faster = [r for r in self.measured if self.rate(r).median > self.rate(best).median]
        return [
            _told("faster_but", policy=str(row.policy), why=self.against(row)) for row in faster
        ]

    def _leaner(self, best: Row) -> list[str]:
        """Name the row that takes least memory, if it is as good and about as fast."""
        peak = best.steps[-1].peak_memory_bytes
        lean = [
            row
            for row in self.measured
            if row.steps[-1].peak_memory_bytes < 0.95 * peak
            and self.rate(row).high >= self.rate(best).low
            and not self.against(row)
        ]
        row = min(lean, key=lambda row: row.steps[-1].peak_memory_bytes, default=None)
        if row is None:
            return []
        less = (peak - row.steps[-1].peak_memory_bytes) / 1e6
        return [_told("leaner", policy=str(row.policy), less=less)]

    def doubts(self) -> list[str]:
        """Say what makes the figures doubtful, and what to do about it."""
        found = []
        if self.reference is not self.rows[0]:
            found.append(_told("reference_missing", policy=str(self.rows[0].policy)))
        if self.timed < LEAST:
            found.append(_told("few_counted", steps=self.timed))
        if self.learned <= 3 * self.noise:
            found.append(_told("flat", fell=self.learned, noise=self.noise))
        if not self.together:
            found.append(_told("not_together"))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; NaN is None."""
        reference = self.reference
        values = {
            "name": self.name,
            "model": reference.opened["summary"] if reference else None,
            "synthetic_data": self.synthetic,
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "threads": self.threads,
            "unit": self.unit,
            "steps": self.steps,
            "steps_timed": self.timed,
            "seconds": self.seconds,
            "took_turns": self.together,
            "reference": str(reference.policy) if reference else None,
            "noise": self.noise,
            "learned": self.learned,
            "recommended": str(self.best.policy) if self.best else None,
            "recommendation": self.recommendation(),
            "rows": [self._row_json(row) for row in self.rows],
        }
        found: dict[str, Any] = _plain(values)
        return found

    def _row_json(self, row: Row) -> dict[str, Any]:
        if row.why_not:
            return {"policy": str(row.policy), "measured": False, "why_not": row.why_not}
        return {
            "policy": str(row.policy),
            "measured": True,
            "support": row.opened["support"],
            "per_second": self.rate(row)._asdict(),
            "step_seconds": self.seconds_of(row)._asdict(),
            "peak_memory_bytes": row.steps[-1].peak_memory_bytes,
            "loss": self.loss(row),
            "losses": [step.loss for step in row.steps],
            "lost_updates": self.lost(row),
            "skipped": sum(not step.applied for step in row.steps),
            "against": self.against(row),
        }

    def write(self, folder: Path) -> Path:
        """Write ``bench.json`` into a folder, which is made if absent; return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "bench.json"
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{text}\n")
        return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
