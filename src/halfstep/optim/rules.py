"""The update rules, in fp32, as pure functions of weight, gradient and moments.

Each is written as the sequence of rounded fp32 operations that every kernel repeats, so that the
compiled kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Name = Literal["adamw", "sgd", "lion"]
Moved = tuple[Tensor, Tensor, Tensor]
_Constants = Callable[[dict[str, Any], int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One update rule.

    Attributes:
        name: How kernels know it.
        moments: Names of its state, as ``torch.optim`` has them; the first is signed.
        constants: Group options and step number (from 1) to the rule's fp32 constants.
        move: (weight, gradient, first, second, constants) to the new weight, first and second; all
            fp32 of one shape; a moment that the rule has not is handed through.
    """

    name: Name
    moments: tuple[str, ...]
    constants: _Constants
    move: Callable[[Tensor, Tensor, Tensor, Tensor, tuple[float, ...]], Moved]


def _adamw_constants(group: dict[str, Any], step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - group["lr"] * group["weight_decay"],
        group["lr"] / (1 - beta1**step),
        (1 - beta2**step) ** -0.5,
        group["eps"],
    )


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: tuple[float, ...]) -> Moved:
    beta1, rest1, beta2, rest2, decay, size, correction, eps = c
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * rest2) * g  # torch's order: g * g would overflow above 1.8e19
    root = v.double().sqrt().float()  # correctly rounded; torch's own fp32 root is not on CPUs
    return w * decay - (m / (root * correction + eps)) * size, m, v


def _sgd_constants(group: dict[str, Any], step: int) -> tuple[float, ...]:
    keep = group["momentum"] if step > 1 else 0.0
    return (
        keep,
        1.0 if step == 1 or not group["momentum"] else 1 - group["dampening"],
        group["weight_decay"],
        group["lr"],
        1.0 if group["nesterov"] else 0.0,
        group["momentum"] if group["nesterov"] else 1.0,
    )


def _sgd(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: tuple[float, ...]) -> Moved:
    momentum, fresh, decay, lr, direct, through = c
    g = g + w * decay
    m = m * momentum + g * fresh
    return w - (g * direct + m * through) * lr, m, v


def _lion_constants(group: dict[str, Any], step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    return (beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * group["weight_decay"], lr)


def _lion(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: tuple[float, ...]) -> Moved:
    beta1, rest1, beta2, rest2, decay, lr = c
    moved = w * decay - torch.sign(m * beta1 + g * rest1) * lr
    return moved, m * beta2 + g * rest2, v


# Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2;
# Sutskever et al., "On the importance of initialization and momentum", ICML 2013, in the form of
# torch.optim.SGD; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
ADAMW = Algorithm("adamw", ("exp_avg", "exp_avg_sq"), _adamw_constants, _adamw)
SGD = Algorithm("sgd", ("momentum_buffer",), _sgd_constants, _sgd)
LION = Algorithm("lion", ("exp_avg",), _lion_constants, _lion)
