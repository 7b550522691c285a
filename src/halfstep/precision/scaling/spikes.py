"""Finds finite spikes: a loss or gradient norm far above where the last applied steps lead.

A bad batch, one wild update or a flipped bit often leaves loss and gradients finite, so the checks
for NaN and inf let the step through. Here both values are compared, as logarithms and before the
update, with the line through the last :data:`WINDOW` applied steps, and with how far the furthest
of the last thousand was from such a line. A single value decides only if it is far out; both
together decide sooner, and so does a loss that is higher than any before it. A spike that comes
again, as of every 40th, longer batch or a curriculum, is data: it is applied.

The limits were chosen on recorded healthy runs and judged on others:
``docs/decisions/0018-finite-spikes.md`` has the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Spiking = Literal["loss_spike", "gradient_spike"]
WINDOW = 128
"""Applied steps that a new one is compared with."""
FEWEST = 20
"""Applied steps before the first test."""
MEMORY = 1000
"""Applied steps after which what was far out is forgotten."""
AGAIN, EVER = 2.0, 10.0
"""A step no more than twice one that was left out is data, not an accident: it is applied. That
holds for losses up to 10 times the highest ever applied."""
LOSS_LIMIT, NORM_LIMIT = 5.0, 10.0
"""Robust standard deviations that each value alone may be above where the steps before lead."""
RECORD_LIMIT, RECORD = 3.0, 1.4
"""The same for a loss that is more than 1.4 times the highest one of all applied steps."""
_FEW = 4.0  # with n steps in the window both limits grow by 1 + 4 / n, as n steps tell less
_RECENT = 16  # steps whose median the expected value is not below: a falling line overshoots
_TO_SIGMA = 1.4826  # of a normal distribution's MAD
_OF_FURTHEST = 3.0  # times how far the furthest applied step was: a heavy tail has such steps
_LEAST_LOSS, _LEAST_NORM = 0.02, 0.1  # least deviations, relative: of runs without any noise
_TINIEST = 2.0**-149  # stands for a norm of 0


_Pair = tuple[float, float]
_Left = tuple[float, float, int]


@dataclass(frozen=True, slots=True)
class Spike:
    """A step that is too far from the ones before it."""

    reason: Spiking  # which of the two values is further out
    expected_loss: float  # where the steps before lead
    expected_norm: float
    excess: float  # distance of both from there, as a multiple of what is allowed; above 1


class SpikeDetector:
    """Remembers the loss and gradient norm of the last applied steps, and tests the next one.

    Attributes:
        repeated: Whether the step that was tested last is no accident, as it was left out before.
    """

    _seen: deque[_Pair]  # loss and norm
    _highest: float  # loss of any applied step, where losses are positive
    _furthest: _Pair  # that loss and norm of the last thousand steps were from their lines
    _left_out: list[_Left]  # loss, norm, and applied steps since
    _was_spike: bool  # the step before

    def __init__(self) -> None:
        self.restore_(None)

    def test(self, loss: float, norm: float) -> Spike | None:
        """Test a step before its update; remembers nothing of it but how far it is out.

        Where a loss is 0 or negative, now or in the window, losses are compared without logarithms.

        Args:
            loss: The step's loss, finite.
            norm: The 2-norm of its unscaled gradients before clipping, finite.

        Returns:
            What is wrong with it, or None; always None before :data:`FEWEST` steps.
        """
        self.repeated, self._out = False, (0.0, 0.0)
        if len(self._seen) < FEWEST:
            return None
        losses, norms = zip(*self._seen, strict=True)
        logs = min(*losses, loss) > 0
        seen = [*map(math.log, losses)] if logs else [*losses]
        lead, mad, far = _trend(seen)
        lead_norm, mad_norm, far_norm = _trend([math.log(max(norm, _TINIEST)) for norm in norms])
        loss_out = (math.log(loss) if logs else loss) - lead
        norm_out = math.log(max(norm, _TINIEST)) - lead_norm
        self._out = (loss_out if logs else 0.0), norm_out  # in logarithms
        far = max(far, self._furthest[0] if logs else 0.0)
        size = 1.0 if logs else _median(np.abs(seen)) or 1.0
        noise = max(_TO_SIGMA * mad, _LEAST_LOSS * size)
        of_norms = max(_TO_SIGMA * mad_norm, _LEAST_NORM)
        loss_part = _part(loss_out, LOSS_LIMIT * noise, far)
        norm_part = _part(norm_out, NORM_LIMIT * of_norms, max(far_norm, self._furthest[1]))
        excess = math.hypot(loss_part, norm_part)
        if logs and loss > RECORD * self._highest:
            excess = max(excess, _part(loss_out, RECORD_LIMIT * noise, far))
        excess /= 1 + _FEW / len(self._seen)
        if excess <= 1:
            return None
        self.repeated = any(loss <= AGAIN * a and norm <= AGAIN * b for a, b, _ in self._left_out)
        if self.repeated:
            return None
        reason: Spiking = "loss_spike" if loss_part >= norm_part else "gradient_spike"
        expected = math.exp(min(lead, 700.0)) if logs else lead
        return Spike(reason, expected, math.exp(min(lead_norm, 700.0)), excess)

    def leave_out(self, loss: float, norm: float) -> None:
        """Remember a spike that is not applied: if it comes again, it is data."""
        if self._highest > 0 and loss <= EVER * self._highest:
            self._was_spike = True
            self._left_out = [*self._left_out[-3:], (loss, norm, 0)]

    def remember(self, loss: float, norm: float) -> None:
        """Remember an applied step."""
        follows, self._was_spike = self._was_spike, self.repeated
        if self.repeated:
            self._left_out = [(a, b, 0) for a, b, _ in self._left_out]
        if not self.repeated or follows:  # of a new level; a single one tells nothing of others
            self._seen.append((loss, norm))
        if self.repeated:
            return
        self._highest = max(self._highest, loss)
        self._left_out = [(a, b, age + 1) for a, b, age in self._left_out if age < MEMORY]
        far, further = (far * (1 - 1 / MEMORY) for far in self._furthest)
        self._furthest = max(far, self._out[0]), max(further, self._out[1])

    def state(self) -> dict[str, Any]:
        """Everything that later tests depend on: numbers in lists, which JSON keeps exactly."""
        return {
            "highest_loss": self._highest,
            "window": [[*one] for one in self._seen],
            "furthest": [*self._furthest],
            "left_out": [[*one] for one in self._left_out],
            "was_spike": self._was_spike,
        }

    def restore_(self, state: Mapping[str, Any] | None) -> None:
        """Continue from :meth:`state`, or begin anew from None."""
        saved: Mapping[str, Any] = state or {"highest_loss": 0.0, "window": []}
        self._highest = saved["highest_loss"]
        self._seen = deque([(loss, norm) for loss, norm in saved["window"]], maxlen=WINDOW)
        far, further = saved.get("furthest", (0.0, 0.0))  # not in states of older versions
        self._furthest = far, further
        self._left_out = [(loss, norm, age) for loss, norm, age in saved.get("left_out", ())]
        self._was_spike = saved.get("was_spike", False)
        self.repeated, self._out = False, (0.0, 0.0)


def _part(out: float, limit: float, furthest: float) -> float:
    """How far out a value is, as a multiple of what is allowed."""
    return max(out, 0.0) / max(limit, _OF_FURTHEST * furthest)


def _trend(values: Sequence[float]) -> tuple[float, float, float]:
    """Where values lead by a resistant line, their MAD around it, and the furthest above it.

    The line is Tukey's, through the medians of the first and the last third.

    **Source:** Tukey, Exploratory Data Analysis, 1977, chapter 10 (the line); Rousseeuw and Croux,
    "Alternatives to the median absolute deviation", 1993, section 1 (the factor of the MAD).
    """
    seen = np.array(values)
    n, third = len(seen), len(seen) // 3
    slope = (_median(seen[-third:]) - _median(seen[:third])) / (n - third)
    times = np.arange(n)
    start = _median(seen - slope * times)
    residuals = seen - (start + slope * times)
    expected = max(start + slope * n, _median(seen[-_RECENT:]))
    return expected, _median(np.abs(residuals)), float(residuals.max())


def _median(values: np.ndarray[Any, Any]) -> float:
    """``numpy.median`` of a short row, which takes it ten times as long."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)
