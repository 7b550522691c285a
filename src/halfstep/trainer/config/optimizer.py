"""How weights are updated: optimizer, clipping and learning-rate schedule; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.trainer.config.read import Amount, Count, Fraction, Positive, Share, require_ranges

OptimizerName = Literal[
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "lion", "muon", "nadam",
    "radam", "rmsprop", "sgd",
]  # fmt: skip
"""The torch.optim optimizers with weight decay, and Lion; Muon has AdamW for all but matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its hyperparameters, and gradient clipping."""

    name: OptimizerName = "adamw"
    """An optimizer of torch.optim in small letters, or lion."""
    learning_rate: Positive = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: Share = 0.9
    """Decay of the first moment per step; for SGD and RMSprop, the momentum."""
    beta2: Share = 0.95
    """Decay of the second moment per step."""
    eps: Positive = 1e-8
    """Added to the root of the second moment; must not be 0 in the optimizer's format."""
    momentum: Share = 0.95
    """Muon's decay of the average of gradients; beta1 and beta2 are those of its AdamW."""
    weight_decay: Amount = 0.1
    """Weight decay of matrices and embeddings; norms and biases do not decay."""
    max_norm: Amount = 1.0
    """Gradients are clipped to this global 2-norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        require_ranges("optimizer", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to a fraction of the peak, or none."""

    warmup_steps: Count = 50
    """Optimizer steps of linear warm-up; at most the length of the run."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warm-up until the run's end: a cosine, a straight line, or the peak."""
    min_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""

    def __post_init__(self) -> None:
        require_ranges("schedule", self)
