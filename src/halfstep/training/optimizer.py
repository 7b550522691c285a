"""AdamW with decay and no-decay groups, in the form that the policy needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.errors import ConfigError
from halfstep.optim.optimizers import AdamW
from halfstep.precision.policy import PrecisionPolicy


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
