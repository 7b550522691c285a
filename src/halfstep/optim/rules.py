"""The update rules, in fp32, as pure functions of weight, gradient and moments.

Each is a fixed sequence of rounded fp32 operations, which every kernel repeats in this order, so
that the compiled kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Moved = tuple[Tensor, Tensor, Tensor]
Constants = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An optimizer's update rule: its name, its moments, its constants and its update."""

    name: str  # its name in kernels and configurations
    moments: tuple[str, ...]  # names of its state, as in ``torch.optim``; the first is signed
    # maps a group's options and a step number, from 1, to the rule's fp32 constants, at most 8
    constants: Callable[[dict[str, Any], int], Constants]
    # maps (weight, gradient, first, second, constants) to the new weight, first and second moment,
    # all fp32 of one shape; a moment that the rule does not use is returned unchanged. Rules of
    # whole matrices get the direction that their optimizer has computed in the gradient's place
    move: Callable[[Tensor, Tensor, Tensor, Tensor, Constants], Moved]


def _adamw_constants(group: dict[str, Any], step: int) -> Constants:
    beta1, beta2 = group["betas"]
    # both moments start at 0: divided by these, an average of equal gradients is that gradient
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    decay = 1 - group["lr"] * group["weight_decay"]
    size, correction = group["lr"] / bias1, bias2**-0.5
    return beta1, 1 - beta1, beta2, 1 - beta2, decay, size, correction, group["eps"]


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    beta1, rest1, beta2, rest2, decay, size, correction, eps = c
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * rest2) * g  # torch's order, as g * g overflows above 1.8e19
    root = v.double().sqrt().float()  # torch's fp32 root on CPUs is not correctly rounded
    return w * decay - (m / (root * correction + eps)) * size, m, v


def _sgd_constants(group: dict[str, Any], step: int) -> Constants:
    momentum, nesterov = group["momentum"], group["nesterov"]
    direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
    fresh = 1 - group["dampening"] if momentum else 1.0
    kept, added = (momentum, fresh) if step > 1 else (0.0, 1.0)  # the first momentum is whole
    return kept, added, group["weight_decay"], group["lr"], direct, through


def _sgd(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    momentum, fresh, decay, lr, direct, through = c
    g = g + w * decay
    m = m * momentum + g * fresh
    return w - (g * direct + m * through) * lr, m, v


def _lion_constants(group: dict[str, Any], step: int) -> Constants:
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    return beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * group["weight_decay"], lr


def _lion(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    beta1, rest1, beta2, rest2, decay, lr = c
    moved = w * decay - torch.sign(m * beta1 + g * rest1) * lr
    return moved, m * beta2 + g * rest2, v


# The rule of whole matrices: what is done with a direction once it is known (optim/muon.py).


def _directed_constants(group: dict[str, Any], step: int) -> Constants:
    return 1 - group["lr"] * group["weight_decay"], group["lr"]


def _directed(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    decay, size = c
    return w * decay - g * size, m, v


def averaging(momentum: float, *, nesterov: bool) -> Constants:
    """SGD's constants for which a zero weight becomes the momentum that a matrix moves by.

    b = momentum b + (1 - momentum) g; the result is b, or (1 - momentum) g + momentum b.
    """
    direct, through = (1 - momentum, momentum) if nesterov else (0.0, 1.0)
    return momentum, 1 - momentum, 0.0, -1.0, direct, through


def _set(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    return g, m, v


# Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2;
# Sutskever et al., "On the importance of initialization and momentum", ICML 2013, in the form of
# torch.optim.SGD; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
ADAMW = Algorithm("adamw", ("exp_avg", "exp_avg_sq"), _adamw_constants, _adamw)
SGD = Algorithm("sgd", ("momentum_buffer",), _sgd_constants, _sgd)
LION = Algorithm("lion", ("exp_avg",), _lion_constants, _lion)
# The kernels' rule, and the optimizer that uses it, whose source stands beside its class.
DIRECTED = Algorithm("directed", (), _directed_constants, _directed)
# What stores masters, which are given in the gradient's place.
SET = Algorithm("set", (), lambda group, step: (), _set)
MUON = Algorithm("muon", ("momentum_buffer",), _directed_constants, _directed)
