"""AdamW with decay and no-decay groups, in the form that the policy needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from halfstep.errors import ConfigError
from halfstep.optim.optimizers import AdamW
from halfstep.precision.policy.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and gradient clipping."""

    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment per step."""
    beta2: float = 0.95
    """Decay of the second moment per step."""
    eps: float = 1e-8
    """Added to the root of the second moment; must not be 0 in the optimizer's format."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings; norms and biases have none."""
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


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, policy: PrecisionPolicy, *, seed: int = 0
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters: one pass over memory per step.

    Tensors of two or more dimensions (matrices, embeddings) decay; vectors (norms, biases) do not.

    Args:
        model: Its parameters may still be fp32.
        config: The numbers.
        policy: halfstep's own AdamW is taken where only that keeps weights and moments as the
            policy says, torch's fused one elsewhere.
        seed: Of stochastic rounding, where the policy rounds so.

    **Source:** Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; the
    split by dimension as in GPT-3 training code published since (nanoGPT, llm.c).
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    every = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in every if group["params"]]
    lr, betas, eps = config.learning_rate, (config.beta1, config.beta2), config.eps
    if policy.needs_own_optimizer:
        return AdamW(groups, lr=lr, betas=betas, eps=eps, seed=seed)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


# The learning rate as a pure function of how many steps were taken and applied.


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
