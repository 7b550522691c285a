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
    # maps group options to the rule's fp32 constants in late steps, at most 8
    settled: Callable[[dict[str, Any]], Constants]
    # maps these and a step number, from 1, to the constants of that step
    at_step: Callable[[Constants, int], Constants]
    # maps (weight, gradient, first, second, constants) to the new weight, first and second moment,
    # all fp32 of one shape; a moment that the rule does not use is returned unchanged. Rules of
    # whole matrices get the direction that their optimizer has computed in the gradient's place
    move: Callable[[Tensor, Tensor, Tensor, Tensor, Constants], Moved]

    def constants(self, group: dict[str, Any], step: int) -> Constants:
        """The rule's fp32 constants for a group's options and a step number, from 1."""
        return self.at_step(self.settled(group), step)


def _adamw_settled(group: dict[str, Any]) -> Constants:
    beta1, beta2 = group["betas"]
    decay = 1 - group["lr"] * group["weight_decay"]
    return beta1, 1 - beta1, beta2, 1 - beta2, decay, group["lr"], 1.0, group["eps"]


def _adamw_at(c: Constants, step: int) -> Constants:
    return (*c[:5], c[5] / (1 - c[0] ** step), (1 - c[2] ** step) ** -0.5, c[7])


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    beta1, rest1, beta2, rest2, decay, size, correction, eps = c
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * rest2) * g  # torch's order, as g * g overflows above 1.8e19
    # By way of fp64, which a Mac's GPU lacks: torch's fp32 root on CPUs is not correctly rounded.
    root = v.sqrt() if v.device.type == "mps" else v.double().sqrt().float()
    return w * decay - (m / (root * correction + eps)) * size, m, v


def _sgd_settled(group: dict[str, Any]) -> Constants:
    momentum, nesterov = group["momentum"], group["nesterov"]
    fresh = 1 - group["dampening"] if momentum else 1.0
    direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
    return momentum, fresh, group["weight_decay"], group["lr"], direct, through


def _sgd_at(c: Constants, step: int) -> Constants:
    return c if step > 1 else (0.0, 1.0, *c[2:])


def _sgd(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    momentum, fresh, decay, lr, direct, through = c
    g = g + w * decay
    m = m * momentum + g * fresh
    return w - (g * direct + m * through) * lr, m, v


def _lion_settled(group: dict[str, Any]) -> Constants:
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    return beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * group["weight_decay"], lr


def _lion(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> Moved:
    beta1, rest1, beta2, rest2, decay, lr = c
    moved = w * decay - torch.sign(m * beta1 + g * rest1) * lr
    return moved, m * beta2 + g * rest2, v


# The rule of whole matrices: what is done with a direction once it is known (optim/muon.py).


def _directed_settled(group: dict[str, Any]) -> Constants:
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


# Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2;
# Sutskever et al., "On the importance of initialization and momentum", ICML 2013, in the form of
# torch.optim.SGD; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
ADAMW = Algorithm("adamw", ("exp_avg", "exp_avg_sq"), _adamw_settled, _adamw_at, _adamw)
SGD = Algorithm("sgd", ("momentum_buffer",), _sgd_settled, _sgd_at, _sgd)
LION = Algorithm("lion", ("exp_avg",), _lion_settled, lambda c, step: c, _lion)
# The kernels' rule, and the optimizer that uses it, whose source stands beside its class.
DIRECTED = Algorithm("directed", (), _directed_settled, lambda c, step: c, _directed)
MUON = Algorithm("muon", ("momentum_buffer",), _directed_settled, lambda c, step: c, _directed)
