"""How Precision steps optimizers: the interface of halfstep's own, and the device's decisions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.policy.policy import PrecisionPolicy

Gradients = Mapping[nn.Parameter, Tensor]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the device decided about a step, read by the host."""

    loss: float
    norm: float  # the global 2-norm of the gradients before clipping
    nonfinite: Mapping[nn.Parameter, bool]  # whose gradients were not finite, and if one was NaN


class DeviceDecision:
    """What the device has decided about a step, which the host reads later."""

    def __init__(
        self, loss: Tensor, norm: Tensor, flags: Tensor, parameters: Sequence[nn.Parameter],
        max_norm: float | None,
    ) -> None:  # fmt: skip
        """Decide on a step without waiting for the device, and begin to copy that to the host.

        Args:
            loss: A scalar.
            norm: The global 2-norm of the gradients, an fp64 scalar on the device.
            flags: int32, one for each gradient; bit 0: it holds infinities, bit 1: it holds NaN.
            parameters: Whose gradients these are.
            max_norm: Clip the norm to this, or None.
        """
        loss = loss.to(norm.device, non_blocking=True)
        wrong = flags.any() | ~loss.isfinite()
        clip = torch.ones_like(norm)
        if max_norm is not None:  # as ``clip_factor``, whose source is there
            clip = (max_norm / (norm + 1e-6)).clamp(max=1)
        self.numbers = torch.stack([wrong.double(), clip, loss.double(), norm])
        """fp64 on the device: above 0 if the step changes nothing, the clip factor, loss, norm."""
        self._parameters = parameters
        gpu = norm.is_cuda
        made = (torch.empty(t.shape, dtype=t.dtype, pin_memory=gpu) for t in (self.numbers, flags))
        self._copies = [*made]
        for copy, source in zip(self._copies, (self.numbers, flags), strict=True):
            copy.copy_(source, non_blocking=gpu)
        self._copied: torch.cuda.Event | None = None
        if gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(norm.device))

    @property
    def found(self) -> Tensor:
        """Above 0 if the step changes nothing, an fp64 scalar on the device."""
        return self.numbers[0]

    @property
    def multiplier(self) -> Tensor:
        """The clip factor, an fp64 scalar on the device."""
        return self.numbers[1]

    def read(self) -> Decision:
        """The decision; waits for this one copy if need be."""
        if self._copied is not None:
            self._copied.synchronize()
        _, _, loss, norm = self._copies[0].tolist()
        flags = zip(self._parameters, self._copies[1].tolist(), strict=True)
        return Decision(loss, norm, {p: bool(flag & 2) for p, flag in flags if flag})


@runtime_checkable
class KeepsMasters(Protocol):
    """An optimizer that stores the bits a 16-bit weight cannot hold, as ``halfstep.optim``'s do."""

    def check_precision(self, update: Any, moments: Any) -> None:
        """Refuse a rounding mode and moment format that contradict its own options."""

    def set_precision(self, update: Any, moments: Any) -> None:
        """Set the rounding mode and the moment format."""

    def check_step(self, gradients: Gradients) -> None:
        """Refuse gradients that a step cannot take, before any optimizer steps."""

    def step(
        self,
        closure: None = None,
        *,
        gradients: Gradients | None = None,
        multiplier: float | DeviceDecision = 1.0,
    ) -> Any:
        """Take a step with these gradients times ``multiplier``."""

    def can_decide(self) -> bool:
        """Whether the device can decide about its steps."""

    def decide(
        self, loss: Tensor, gradients: Gradients, max_norm: float | None
    ) -> DeviceDecision | None:
        """Decide on a step on the device; None where the host must."""

    def uncount(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take back that a step counts, which the device has not applied."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The global norm, as :func:`halfstep.precision.scaling.gradients.global_norm`."""

    def read_master(self, parameter: nn.Parameter) -> Tensor:
        """The exact fp32 values that a parameter and its remainder represent."""

    def write_master_(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Store fp32 values in a parameter and its remainder."""


def takes_gradients(optimizer: Optimizer) -> bool:
    """Whether ``step`` accepts ``gradients=``; a user's subclass may override it without."""
    return isinstance(optimizer, KeepsMasters) and _takes_gradients(type(optimizer))


@cache
def _takes_gradients(kind: type[Any]) -> bool:
    accepted = inspect.signature(kind.step).parameters
    return {"gradients", "multiplier"} <= accepted.keys() or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()
    )


def require_own_optimizer(policy: PrecisionPolicy, optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that cannot keep weights or moments as the policy says."""
    if not policy.needs_own_optimizer:
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, KeepsMasters):
            nearest = "bf16-master" if policy.update != "nearest" else f"{policy}".split(",")[0]
            raise PrecisionError(
                f"policy {policy} needs an optimizer that keeps update={policy.update} and "
                f"moments={policy.moment_format}: one of halfstep.optim; "
                f"{type(optimizer).__name__} does not. The nearest policy for it is {nearest}"
            )


def has_users(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks that are not halfstep's own."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("halfstep.") for hook in hooks.values()
    )
