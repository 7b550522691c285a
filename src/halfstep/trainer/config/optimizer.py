"""How weights are updated: optimizer, clipping and learning-rate schedule; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.option import option
from halfstep.trainer.config.read import Amount, Count, Fraction, Positive, Share, require_ranges

OptimizerName = Literal[
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "lion", "muon", "nadam",
    "radam", "rmsprop", "sgd",
]  # fmt: skip
"""The torch.optim optimizers with weight decay, and Lion; Muon has AdamW for all but matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its hyperparameters, and gradient clipping."""

    name: OptimizerName = option("adamw", "An optimizer of torch.optim in small letters, or lion.")
    learning_rate: Positive = option(1e-3, "Peak learning rate, reached at the end of the warm-up.")
    beta1: Share = option(
        0.9, "Decay of the first moment per step; for SGD and RMSprop, the momentum."
    )
    beta2: Share = option(0.95, "Decay of the second moment per step.")
    eps: Positive = option(
        1e-8, "Added to the root of the second moment; must not be 0 in the optimizer's format."
    )
    momentum: Share = option(
        0.95, "Muon's decay of the average of gradients; beta1 and beta2 are those of its AdamW."
    )
    adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "Muon's learning rate of a matrix: with match_rms_adamw one rate suits matrices and AdamW.",
    )
    weight_decay: Amount = option(
        0.1, "Weight decay of matrices and embeddings; norms and biases do not decay."
    )
    max_norm: Amount = option(
        1.0, "Gradients are clipped to this global 2-norm; 0 switches clipping off."
    )

    def __post_init__(self) -> None:
        require_ranges("optimizer", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to a fraction of the peak, or none."""

    warmup_steps: Count = option(
        50, "Optimizer steps of linear warm-up; at most the length of the run."
    )
    decay: Literal["cosine", "linear", "wsd", "constant"] = option(
        "cosine",
        "What follows the warm-up: a cosine, a straight line, warm-up-stable-decay (the peak, "
        "then a straight line at the end), or the peak throughout.",
    )
    decay_steps: Count = option(0, "The step at which the decay ends; 0: the run's max_steps.")
    decay_ratio: Fraction = option(
        0.2, "For wsd: the fraction of the steps, at the end, over which the rate falls."
    )
    on_skip: Literal["hold", "advance"] = option(
        "hold", "Whether a skipped step holds the schedule where it is or advances it all the same."
    )
    min_ratio: Fraction = option(
        0.1, "Learning rate at the end of the decay, as a fraction of the peak."
    )

    def __post_init__(self) -> None:
        require_ranges("schedule", self)
