"""Makes a run's optimizer and computes its learning rate, both chosen by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep.optim as optim
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.precision.policy.policy import POLICIES, PrecisionPolicy
from halfstep.trainer.config.run import OptimizerConfig, ScheduleConfig

OWN: Mapping[str, Callable[..., Optimizer]] = {
    kind.algorithm.name: kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, LowPrecisionOptimizer)
}
"""The name of each of halfstep's optimizers to its class."""
_TORCH = {name.lower(): name for name in torch.optim.__all__}
_FUSED = {"adam", "adamw", "sgd"}  # torch has a fused kernel on CPU and CUDA alike


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, policy: PrecisionPolicy, *, seed: int = 0
) -> Optimizer:
    """Make the optimizer that a configuration names, over the trainable parameters.

    Tensors of two or more dimensions (matrices, embeddings) decay; vectors (norms, biases) do not.

    Args:
        model: Its parameters may still be fp32.
        config: Name and hyperparameters. An optimizer gets those that its class takes: SGD and
            RMSprop take ``beta1`` as momentum, RMSprop takes ``beta2`` as alpha. Muon updates
            hidden matrices and AdamW the rest, as :func:`halfstep.optim.muon_groups` picks them.
        policy: halfstep's optimizer is used where no other keeps weights and moments as the policy
            says, torch's optimizer elsewhere (the fused one where torch
            has it).
        seed: Seed of stochastic rounding, where the policy uses it.

    Raises:
        PrecisionError: Later, from ``Precision``, if the policy needs a halfstep optimizer and the
            name is not one of those.

    **Source:** Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; the
    split by dimension as in GPT-3 training code published since (nanoGPT, llm.c).
    """
    if config.name == "muon":
        return _make_muon(model, config, seed)
    trainable = [p for p in model.parameters() if p.requires_grad]
    every = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in every if group["params"]]
    own = config.name in OWN and (policy.needs_own_optimizer or config.name not in _TORCH)
    make = OWN[config.name] if own else getattr(torch.optim, _TORCH[config.name])
    offered = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "momentum": config.beta1,
        "eps": config.eps,
        "seed": seed,
    }
    taken = inspect.signature(make).parameters
    arguments: dict[str, Any] = {name: value for name, value in offered.items() if name in taken}
    if config.name == "rmsprop":  # ASGD has an alpha too, with another meaning
        arguments["alpha"] = config.beta2
    if not own and config.name in _FUSED:
        arguments["fused"] = True
    return make(groups, **arguments)


def averages(config: OptimizerConfig, model: nn.Module) -> float | Mapping[str, float]:
    """How many tensors of a parameter's size the optimizer keeps: 2 for AdamW, 1 for SGD.

    By parameter for Muon, where it depends on the shape; for any other counted on a small
    parameter.
    """
    if config.name == "muon":
        return _make_muon(model, config, 0).averages(model)
    probe = nn.ParameterList([torch.zeros(64, 64)])  # nn.Linear would draw random numbers
    (weight,) = probe.parameters()
    optimizer = make_optimizer(probe, config, POLICIES["fp32"])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = [t for t in optimizer.state[weight].values() if isinstance(t, Tensor) and t.dim()]
    return sum(t.numel() for t in kept) / weight.numel()


def _make_muon(model: nn.Module, config: OptimizerConfig, seed: int) -> optim.Muon:
    """Halfstep's Muon in every policy, as torch's takes matrices only."""
    return optim.Muon(
        optim.muon_groups(model, eps=config.eps),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",  # one rate suits matrices and AdamW
        betas=(config.beta1, config.beta2),
        seed=seed,
    )


def learning_rate(peak: float, schedule: ScheduleConfig, applied: int, max_steps: int) -> float:
    """Compute the learning rate of the next step.

    Args:
        peak: Learning rate at the end of the warm-up.
        schedule: Warm-up and decay.
        applied: Steps so far that updated the weights; a skipped step holds the schedule.
        max_steps: Length of the run, in steps.

    **Source:** cosine: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
    """
    if applied < schedule.warmup_steps:
        return peak * (applied + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    start = schedule.warmup_steps
    progress = min(max(applied - start, 0) / max(max_steps - start, 1), 1.0)
    floor = schedule.min_ratio
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.decay == "cosine" else 1 - progress
    return peak * (floor + (1 - floor) * left)
