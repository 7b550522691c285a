"""The learning rate as a pure function of how many steps were applied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then a cosine to a fraction of the peak, or a constant."""

    warmup_steps: int = 50
    """Optimizer steps of linear warm-up; at most the length of the run."""
    decay: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up."""
    decay_steps: int = 0
    """The step at which the cosine ends; 0: the run's max_steps."""
    min_ratio: float = 0.1
    """Learning rate at the end of the cosine, as a fraction of the peak."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps}, schedule.decay_steps="
                f"{self.decay_steps}; allowed: integers >= 0"
            )
        if not 0 <= self.min_ratio <= 1:
            raise ConfigError(f"schedule.min_ratio={self.min_ratio}; allowed: 0 to 1")


def learning_rate(peak: float, schedule: ScheduleConfig, applied: int, max_steps: int) -> float:
    """The learning rate of the step that follows ``applied`` applied steps.

    Args:
        peak: Learning rate at the end of the warm-up.
        schedule: Warm-up and decay.
        applied: Optimizer steps applied so far; skipped ones do not count, so the schedule holds.
        max_steps: Length of the run, in steps.

    **Source:** cosine: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
    """
    if applied < schedule.warmup_steps:
        return peak * (applied + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    end = schedule.decay_steps or max_steps
    span = max(end - schedule.warmup_steps, 1)
    progress = min((applied - schedule.warmup_steps) / span, 1.0)
    floor = schedule.min_ratio
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
