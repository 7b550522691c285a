"""Finds finite spikes: a loss or gradient norm far above where the last applied steps lead.

A bad batch, one wild update or a flipped bit often leaves loss and gradients finite, so the checks
for NaN and inf let the step through. Here both values are compared, as logarithms and before the
update, with the line through the last :data:`WINDOW` applied steps. A single value decides only if
it is far out; both together decide sooner, and so does a loss that is higher than any before it.
Skipped steps and non-finite ones are never remembered.

The limits were chosen on recorded healthy runs and judged on others:
``docs/decisions/0018-finite-spikes.md`` has the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from halfstep.errors import PrecisionError

Spiking = Literal["loss_spike", "gradient_spike"]
WINDOW = 128
"""Applied steps that a new one is compared with."""
FEWEST = 20
"""Applied steps before the first test."""
LOSS_LIMIT, NORM_LIMIT = 5.0, 10.0
"""Robust standard deviations that each value alone may be above where the steps before lead."""
RECORD_LIMIT, RECORD = 3.0, 1.4
"""The same for a loss that is more than 1.4 times the highest one of all applied steps."""
_FEW = 4.0  # with n steps in the window both limits grow by 1 + 4 / n, as n steps tell less
_RECENT = 16  # steps whose median the expected value is not below: a falling line overshoots
_TO_SIGMA = 1.4826  # of a normal distribution's MAD
_THIRD_OF_WINDOW = 2.0  # the third largest of 128 normal numbers, in standard deviations
_LEAST_LOSS, _LEAST_NORM = 0.02, 0.1  # least deviations, relative: of runs without any noise
_TINIEST = 2.0**-149  # stands for a norm of 0


@dataclass(frozen=True, slots=True)
class Spike:
    """A step that is too far from the ones before it."""

    reason: Spiking
    """Which of the two values is further out."""
    expected_loss: float
    """Where the steps before lead."""
    expected_norm: float
    """The same for the global gradient norm."""
    excess: float
    """Distance of loss and norm together from there, as a multiple of what is allowed; above 1."""


class SpikeDetector:
    """Remembers the loss and gradient norm of the last applied steps, and tests the next one."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._highest = 0.0  # loss of any applied step, where losses are positive

    def test(self, loss: float, norm: float) -> Spike | None:
        """Test a step before its update; remembers nothing.

        Where a loss is 0 or negative, now or in the window, losses are compared without logarithms.

        Args:
            loss: The step's loss, finite.
            norm: The 2-norm of its unscaled gradients before clipping, finite.

        Returns:
            What is wrong with it, or None; always None before :data:`FEWEST` steps.
        """
        if len(self._seen) < FEWEST:
            return None
        losses, norms = zip(*self._seen, strict=True)
        logs = min(*losses, loss) > 0
        loss_above, expected_loss = _deviation([*losses, loss], _LEAST_LOSS, logs=logs)
        tiny = [max(value, _TINIEST) for value in (*norms, norm)]
        norm_above, expected_norm = _deviation(tiny, _LEAST_NORM, logs=True)
        loss_part = max(loss_above, 0.0) / LOSS_LIMIT
        norm_part = max(norm_above, 0.0) / NORM_LIMIT
        excess = math.hypot(loss_part, norm_part)
        if logs and loss > RECORD * self._highest:
            excess = max(excess, loss_part * LOSS_LIMIT / RECORD_LIMIT)
        excess /= 1 + _FEW / len(self._seen)
        if excess <= 1:
            return None
        reason: Spiking = "loss_spike" if loss_part >= norm_part else "gradient_spike"
        return Spike(reason, expected_loss, expected_norm, excess)

    def remember(self, loss: float, norm: float) -> None:
        """Remember an applied step."""
        self._seen.append((loss, norm))
        self._highest = max(self._highest, loss)

    def state(self) -> dict[str, Any]:
        """Everything that later tests depend on: numbers in lists, which JSON keeps exactly."""
        window = [[loss, norm] for loss, norm in self._seen]
        return {"highest_loss": self._highest, "window": window}

    def restore_(self, state: object) -> None:
        """Continue from :meth:`state`, or begin anew from None."""
        self._highest, window = as_state(state)
        self._seen = deque(window, maxlen=WINDOW)


def as_state(state: object) -> tuple[float, list[tuple[float, float]]]:
    """Check a detector's saved state, which may come from a damaged file; None is an empty one."""
    if state is None:
        return 0.0, []
    saved: Any = state
    try:
        highest, window = saved["highest_loss"], [(loss, norm) for loss, norm in saved["window"]]
        values = [highest, *(value for pair in window for value in pair)]
        if len(window) <= WINDOW and all(map(math.isfinite, values)):
            return highest, window
    except (KeyError, TypeError, ValueError):
        pass
    raise PrecisionError(
        f"the saved precision state has spikes={state!r:.80}: not the highest loss, and the loss "
        f"and norm of at most {WINDOW} steps"
    )


def _deviation(values: Sequence[float], least: float, *, logs: bool) -> tuple[float, float]:
    """How far the last value is above where the others lead, and where that is.

    The line is Tukey's resistant one, through the medians of the first and the last third. The
    deviation is the largest of three: the MAD of the residuals, as of normal noise; their third
    largest, which is more where the noise has a heavy tail; and ``least``, relative to the values.

    **Source:** Tukey, Exploratory Data Analysis, 1977, chapter 10 (the line); Rousseeuw and Croux,
    "Alternatives to the median absolute deviation", 1993, section 1 (the factor of the MAD).
    """
    every = np.array([math.log(v) for v in values] if logs else values)
    seen, new = every[:-1], float(every[-1])
    n = len(seen)
    third = n // 3
    first, last = _median(seen[:third]), _median(seen[-third:])
    slope = (last - first) / (n - third)
    times = np.arange(n)
    start = _median(seen - slope * times)
    residuals = np.sort(seen - (start + slope * times))
    expected = max(start + slope * n, _median(seen[-_RECENT:]))
    mad = _median(np.abs(residuals))
    rank = min(3, max(1, n // 40))  # the largest itself, while the window fills
    tail = float(residuals[-rank]) / _THIRD_OF_WINDOW
    if not logs:
        least *= _median(np.abs(seen)) or 1.0
    above = (new - expected) / max(_TO_SIGMA * mad, tail, least)
    return above, math.exp(min(expected, 700.0)) if logs else expected


def _median(values: np.ndarray[Any, Any]) -> float:
    """``numpy.median`` of a short row, which takes it ten times as long."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)
