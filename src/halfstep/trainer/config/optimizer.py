"""How weights are updated: optimizer, clipping, and the learning rate over time; no torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from halfstep.errors import ConfigError

OptimizerName = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "lion", "nadam", "radam",
    "rmsprop", "sgd",
]  # fmt: skip
"""Those of torch.optim with weight decay, but Muon, which takes matrices only; and Lion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, its numbers, and gradient clipping."""

    name: OptimizerName = "adamw"
    """An optimizer of torch.optim in small letters, or lion."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment per step; of SGD and RMSprop the momentum."""
    beta2: float = 0.95
    """Decay of the second moment per step."""
    eps: float = 1e-8
    """Added to the root of the second moment; must not be 0 in the optimizer's format."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; norms and biases have none."""
    max_norm: float = 1.0
    """Gradients are clipped to this global 2-norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}; allowed: > 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}; allowed: 0 <= x < 1")
        for name in ("weight_decay", "max_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}; allowed: >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to a fraction of the peak, or none."""

    warmup_steps: int = 50
    """Optimizer steps of linear warm-up; at most the length of the run."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """What follows the warm-up: a cosine, a straight line, warm-up-stable-decay (the peak, and at
    the end a straight line), or the peak for ever."""
    decay_steps: int = 0
    """The step at which the decay ends; 0: the run's max_steps."""
    decay_ratio: float = 0.2
    """Of wsd: the share of the steps, at their end, in which the rate falls."""
    on_skip: Literal["hold", "advance"] = "hold"
    """Whether a skipped step leaves the schedule where it is, or moves it on all the same."""
    min_ratio: float = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their range."""
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps}, schedule.decay_steps="
                f"{self.decay_steps}; allowed: integers >= 0"
            )
        for name in ("min_ratio", "decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name}={getattr(self, name)}; allowed: 0 to 1")
