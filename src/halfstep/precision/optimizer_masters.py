"""Optimizers that keep masters beside 16-bit weights and step in one pass over memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.gradients import global_norm
from halfstep.precision.policy import PrecisionPolicy

Gradients = Mapping[nn.Parameter, Tensor]


@runtime_checkable
class KeepsMasters(Protocol):
    """An optimizer that keeps what a 16-bit weight cannot hold: those of ``halfstep.optim``."""

    def check_precision(self, update: Any, moments: Any) -> None:
        """Refuse ways of keeping weights and moments that contradict its own."""

    def set_precision(self, update: Any, moments: Any) -> None:
        """Take the ways of keeping weights and moments."""

    def check_step(self, gradients: Gradients) -> None:
        """Refuse gradients that a step cannot take, before any optimizer steps."""

    def step(
        self, closure: None = None, *, gradients: Gradients | None = None, multiplier: float = 1.0
    ) -> Any:
        """Take a step with these gradients times a number."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all: :func:`halfstep.precision.gradients.global_norm`."""

    def read_master(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 numbers that a parameter stands for."""

    def write_master_(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Round fp32 numbers into a parameter and what is kept beside it."""


def common_norm(optimizers: Sequence[Optimizer], gradients: Sequence[Tensor]) -> Tensor:
    """The gradients' 2-norm as fp32 scalar on their device, by halfstep's kernel if one is there.

    See :func:`halfstep.precision.gradients.global_norm`.
    """
    if not any(gradient.is_sparse for gradient in gradients):
        for optimizer in optimizers:
            if isinstance(optimizer, KeepsMasters):
                return optimizer.norm(gradients)
    return global_norm(gradients)


def takes_gradients(optimizer: Optimizer) -> bool:
    """Whether ``step`` can be given gradients; a user's subclass may have a ``step`` of its own."""
    return isinstance(optimizer, KeepsMasters) and _has_gradients(type(optimizer))


@cache
def _has_gradients(kind: type[Any]) -> bool:
    accepted = inspect.signature(kind.step).parameters
    return {"gradients", "multiplier"} <= accepted.keys() or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()
    )


def step_optimizers(optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
    """Step: those that take them with these gradients times ``factor``, others as they are."""
    own: list[Any] = [o for o in optimizers if isinstance(o, KeepsMasters)]
    for optimizer in own if len(optimizers) > 1 else ():  # a single one checks for itself
        optimizer.check_step(gradients)
    for optimizer in optimizers:
        if takes_gradients(optimizer):
            step: Any = optimizer.step
            step(gradients=gradients, multiplier=factor)
        else:
            optimizer.step()


def require_own_optimizer(policy: PrecisionPolicy, optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that cannot keep weights or moments as the policy says.

    Raises:
        PrecisionError: Naming the optimizer, the policy and the nearest that works.
    """
    if not policy.needs_own_optimizer:
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, KeepsMasters):
            nearest = "bf16-master" if policy.update != "nearest" else f"{policy}".split(",")[0]
            raise PrecisionError(
                f"policy {policy} needs an optimizer that keeps update={policy.update} and "
                f"moments={policy.moment_format}: halfstep.optim's AdamW, SGD or Lion; "
                f"{type(optimizer).__name__} does not. The nearest policy for it is {nearest}"
            )
