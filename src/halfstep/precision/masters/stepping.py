"""How Precision steps optimizers: the interface of halfstep's own, and users' hooks on a step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

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

    def holds(self, parameter: Tensor) -> bool:
        """Whether a group holds this tensor."""

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


# Users' optimizer step hooks, under a policy where masters replace the weights during a step.


class Rounded(Protocol):
    """The part of :class:`MasterWeights` that :class:`StepHooks` uses."""

    def push_(self, targets: Gradients) -> None:
        """Round the masters that got a gradient into their weights."""

    def rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of each master and its weight."""


class StepHooks:
    """Lets a user's step hooks read and write the model's weights at the right time.

    A user's post-step hook, such as an average, reads the model, so the weights are rounded from
    the masters before it runs; what hooks write into weights is adopted after they have run.
    This costs nothing if the user has not hooked the optimizer.
    """

    def __init__(self) -> None:
        self._gradients: Gradients | None = None  # of the step in progress
        self._seen: list[Tensor] = []  # copies of the weights before the user's hooks ran
        self._first: list[tuple[Any, int]] = []  # each dict of pre-hooks, and our hook's id in it

    def surround(
        self, optimizer: Optimizer, masters: weakref.ref[Rounded]
    ) -> list[RemovableHandle]:
        """Put our hooks around the step itself: the last pre-hook and the first post-hook."""

        def before(*_: Any) -> None:
            self.take_(masters())

        def after(*_: Any) -> None:
            held = masters()
            if held is not None and self._gradients is not None and has_users(hooks_after):
                held.push_(self._gradients)
                self._look(held)

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        hooks_before: Any = handles[0].hooks_dict_ref()
        hooks_after: Any = handles[1].hooks_dict_ref()
        self._first.append((hooks_before, handles[0].id))
        hooks_after.move_to_end(handles[1].id, last=False)
        return handles

    @contextmanager
    def stepping(self, masters: Rounded, gradients: Gradients) -> Iterator[None]:
        """The context for a step with these gradients."""
        for hooks, number in self._first:
            if has_users(hooks):
                hooks.move_to_end(number)
                self._look(masters)
        self._gradients = gradients
        try:
            yield
            self.take_(masters)
        finally:
            self._gradients, self._seen = None, []

    def _look(self, masters: Rounded) -> None:
        self._seen = [visible.clone() for _, visible in masters.rounded()]

    @torch.no_grad()
    def take_(self, masters: Rounded | None) -> None:
        """Make masters adopt what hooks have written into weights since :meth:`_look`."""
        if masters is None or not self._seen:
            return
        for (master, visible), before in zip(masters.rounded(), self._seen, strict=True):
            written = visible.view(torch.int16) != before.view(torch.int16)
            if bool(written.any()):
                master.copy_(torch.where(written, visible.float(), master))
        self._seen = []


class UserHooks:
    """Tells whether hooks of a user would run when an optimizer steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        before = optimizer.register_step_pre_hook(lambda *_: None)
        after = optimizer.register_step_post_hook(lambda *_: None)
        self._hooks = before.hooks_dict_ref, after.hooks_dict_ref
        before.remove()
        after.remove()

    def present(self) -> bool:
        """Whether there are any now, on this optimizer or on all."""
        own = [hooks() or {} for hooks in self._hooks]
        of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        return any(map(has_users, (*own, *of_all)))


def has_users(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks that are not halfstep's own."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("halfstep.") for hook in hooks.values()
    )
