"""Lets torch's scaler and optimizers work on mixes of DTensors and plain or complex tensors.

A tensor-parallel plan leaves the parameters that it does not name plain, and torch's overflow
check and its foreach and fused optimizers refuse lists that mix plain tensors with DTensors. They
work element-wise, so the check can use only this rank's parts, and the step of a mixed optimizer
can be taken as one step of its DTensors and one of its plain tensors. halfstep's optimizers take
only plain tensors, and so get this rank's parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.integrations.grad_scaler.parameter_names import owned, with_gradients
from halfstep.precision.masters.local_part import as_target, is_sharded, local_gradient, local_part
from halfstep.precision.masters.stepping import KeepsMasters


class LocalGradients:
    """A stand-in for an optimizer whose gradients are this rank's parts, for torch's check.

    The parts share memory with the gradients, which are first redistributed like their parameters:
    partial sums could still overflow when they are added up.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        found = (local_gradient(parameter) for parameter in with_gradients(optimizer))
        parts = [_carrying(gradient) for gradient in found if gradient is not None]
        self.param_groups = [{"params": parts}]


def _carrying(gradient: Tensor) -> Tensor:
    """A real tensor whose ``grad`` is this gradient, in place of the parameter."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    carrier = gradient.detach().requires_grad_()
    carrier.grad = gradient
    return carrier


def kinds(optimizer: Optimizer) -> set[str]:
    """The kinds of an optimizer's gradients: ``"sharded"``, ``"plain"``, ``"complex"``."""
    every = with_gradients(optimizer)
    found = {"sharded" if is_sharded(p) else "plain" for p in every}
    return found | {"complex"} if any(p.is_complex() for p in every) else found


def stepping(optimizer: Optimizer) -> AbstractContextManager[None]:
    """The context in which ``optimizer.step`` works for all kinds of tensors that it has."""
    if isinstance(optimizer, KeepsMasters):
        return _on_parts(optimizer) if "sharded" in kinds(optimizer) else nullcontext()
    kernels = any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)
    mixed = kernels and kinds(optimizer) >= {"sharded", "plain"}
    return _one_kind_at_a_time(optimizer) if mixed else nullcontext()


@contextmanager
def _one_kind_at_a_time(optimizer: Optimizer) -> Iterator[None]:
    """Make ``optimizer.step`` step its DTensors and its plain tensors in two separate calls."""
    method = optimizer.step
    replaced = optimizer.__dict__.get("step")

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        every = [(p, p.grad) for p in with_gradients(optimizer)]
        value = None
        try:
            for sharded in (True, False):
                for parameter, gradient in every:
                    parameter.grad = gradient if is_sharded(parameter) is sharded else None
                value = method(*args, **kwargs)
        finally:
            for parameter, gradient in every:
                parameter.grad = gradient
        return value

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if replaced is None:
            del optimizer.step
        else:
            optimizer.step = replaced  # type: ignore[method-assign]


@contextmanager
def _on_parts(optimizer: Optimizer) -> Iterator[None]:
    """Replace the DTensors of an optimizer, and the keys of its state, by this rank's parts."""
    parts: dict[Tensor, Tensor] = {}
    for parameter in owned(optimizer):
        if is_sharded(parameter):
            parts[parameter] = as_target(local_part(parameter), parameter)
            parts[parameter].grad = local_gradient(parameter)
    _exchange(optimizer, parts)
    try:
        yield
    finally:
        _exchange(optimizer, {part: parameter for parameter, part in parts.items()})


def _exchange(optimizer: Optimizer, new: dict[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in new]:
        optimizer.state[new[old]] = optimizer.state.pop(old)
