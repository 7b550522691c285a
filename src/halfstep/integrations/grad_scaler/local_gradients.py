"""Gradients of DTensors beside plain ones, and complex ones, for code of torch that takes neither.

Tensor parallelism by a plan leaves the parameters that no plan names plain, and torch's overflow
check, its foreach and its fused optimizers refuse lists that mix them with DTensors. What they do
is element by element, so the check can look at this rank's parts alone, and a step of a mixed
optimizer can be taken as one of its DTensors and one of its plain tensors. halfstep's optimizers
take plain tensors only, and so this rank's parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.integrations.grad_scaler.parameter_names import owned, with_gradients
from halfstep.precision.masters.local_part import is_sharded, local_gradient, local_part
from halfstep.precision.masters.stepping import KeepsMasters


class LocalGradients:
    """Stands in for an optimizer where only its gradients are asked for: this rank's parts.

    They share memory with the gradients, placed as their parameters are: what is still a partial
    sum can overflow when it is added up.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        found = (local_gradient(parameter) for parameter in with_gradients(optimizer))
        parts = [_carrying(gradient) for gradient in found if gradient is not None]
        self.param_groups = [{"params": parts}]


def _carrying(gradient: Tensor) -> Tensor:
    """A real tensor with this ``grad``, whatever parameter the gradient belongs to."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    carrier = gradient.detach().requires_grad_()
    carrier.grad = gradient
    return carrier


def kinds(optimizer: Optimizer) -> set[str]:
    """What its gradients are: ``"sharded"``, ``"plain"``, and ``"complex"`` where any is."""
    every = with_gradients(optimizer)
    found = {"sharded" if is_sharded(p) else "plain" for p in every}
    return found | {"complex"} if any(p.is_complex() for p in every) else found


def stepping(optimizer: Optimizer) -> AbstractContextManager[None]:
    """The context in which ``optimizer.step`` takes whatever kinds of tensors it has."""
    if isinstance(optimizer, KeepsMasters):
        return _on_parts(optimizer) if "sharded" in kinds(optimizer) else nullcontext()
    kernels = any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)
    mixed = kernels and kinds(optimizer) >= {"sharded", "plain"}
    return _one_kind_at_a_time(optimizer) if mixed else nullcontext()


@contextmanager
def _one_kind_at_a_time(optimizer: Optimizer) -> Iterator[None]:
    """Let ``optimizer.step`` take its DTensors and its plain tensors in two calls of its own."""
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
    """Put this rank's parts in the DTensors' places; what is kept for them stays theirs."""
    parts: dict[Tensor, Tensor] = {}
    for parameter in owned(optimizer):
        if is_sharded(parameter):
            parts[parameter] = nn.Parameter(local_part(parameter), parameter.requires_grad)
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
