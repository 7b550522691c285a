"""The learning rate as a pure function of how many steps were taken and applied."""

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
    on_skip: Literal["hold", "advance"] = "hold"
    """Whether a skipped step leaves the schedule where it is, or moves it on all the same."""
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


def learning_rate(
    peak: float, schedule: ScheduleConfig, taken: int, applied: int, max_steps: int
) -> float:
    """The learning rate of the next step.

    Args:
        peak: Learning rate at the end of the warm-up.
        schedule: Warm-up and decay.
        taken: Optimizer steps so far, skipped ones included.
        applied: Those of them that updated the weights; the schedule follows these unless
            ``on_skip`` is ``"advance"``.
        max_steps: Length of the run, in steps.

    **Source:** cosine: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
    """
    done = taken if schedule.on_skip == "advance" else applied
    if done < schedule.warmup_steps:
        return peak * (done + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    end = schedule.decay_steps or max_steps
    span = max(end - schedule.warmup_steps, 1)
    progress = min((done - schedule.warmup_steps) / span, 1.0)
    floor = schedule.min_ratio
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
