"""What a loss scaler remembers of a step, as tensors that are read only when somebody asks.

Reading a number of a GPU makes the host wait. So flags, scales and counters stay where they are
until :class:`StepRecord` is resolved; those that are on the host already are kept as numbers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.integrations.grad_scaler.parameter_names import parameter_names
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.result import Reason, StepResult

Held = Tensor | float
"""A number, or a 0-dim tensor on a device whose value nobody has waited for yet."""


def on_host(tensor: Tensor) -> bool:
    """Whether reading the tensor's value makes nobody wait."""
    return tensor.device.type == "cpu"


def hold(tensor: Tensor) -> Held:
    """The tensor's present value: a number where reading it is free, else a copy on its device."""
    return float(tensor.item()) if on_host(tensor) else tensor.detach().clone()


def total(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of per-device flags on one device, in a new tensor."""
    moved = [flag.to(device, non_blocking=True) for flag in flags]
    return torch.stack(moved).sum()


def stored_gradients(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Parameter and what this rank stores of its gradient, for all that have one."""
    owned = (p for group in optimizer.param_groups for p in group["params"])
    return [
        (p, p.grad._values() if p.grad.is_sparse else local_part(p.grad))
        for p in owned
        if p.grad is not None
    ]


class Marks:
    """Which gradients were not finite at one moment, kept without waiting for the device.

    Args:
        optimizer: Whose gradients are marked. Nothing of it is kept alive but names.
        known: Names of parameters, where they are known.
        exact: Tell infinities apart from NaN within one tensor too. Costs two more reads of the
            gradients, so it is for steps that are known to have overflowed. Without it, a tensor
            that holds both counts as NaN.
    """

    def __init__(self, optimizer: Optimizer, known: Mapping[Tensor, str], *, exact: bool) -> None:
        names = parameter_names(optimizer, known)
        with torch.no_grad():
            found = [(p, v.detach()) for p, v in stored_gradients(optimizer) if v.numel()]
            # Tensors of other types cannot be mixed with plain ones in one call.
            found = [(p, v) for p, v in found if type(v) in (Tensor, torch.nn.Parameter)]
            values = [value for _, value in found]
            self._names = [names[parameter] for parameter, _ in found]
            # The largest absolute value of each: NaN if there is a NaN, else inf if there is one.
            self._norms = list(torch._foreach_norm(values, math.inf)) if values else []
            self._inf = [value.isinf().any() for value in values] if exact else None

    def read(self) -> tuple[Reason, tuple[str, ...]]:
        """Why, and the names, NaN first. Synchronises with the host."""
        nan: list[str] = []
        inf: list[str] = []
        for name, norm in zip(self._names, self._norms, strict=True):
            value = float(norm)
            if not math.isfinite(value):
                (nan if math.isnan(value) else inf).append(name)
        any_inf = bool(inf) or any(map(bool, self._inf or ()))
        return "nan_gradients" if nan and not any_inf else "overflow", (*nan, *inf)


class SkipCount:
    """Skipped rounds, counted on whatever device the flags are.

    A round is what lies between two calls of ``update``; with one optimizer it is a step.
    """

    def __init__(self, total: int = 0, in_a_row: int = 0, *, applied: bool = False) -> None:
        self._total: Held = total
        self._last_applied: Held = int(applied)  # number of that round, 0 for none
        self._rounds = int(applied) + in_a_row

    def add(self, skipped: Held) -> None:
        """Count one round; ``skipped`` is 1 or 0."""
        self._rounds += 1
        self._total = self._total + skipped
        self._last_applied = self._last_applied + (self._rounds - self._last_applied) * (
            1 - skipped
        )

    @property
    def total(self) -> int:
        """Skipped rounds so far."""
        return int(self._total)

    @property
    def in_a_row(self) -> int:
        """Skipped rounds since the last one that was applied."""
        return self._rounds - int(self._last_applied)

    @property
    def any_applied(self) -> bool:
        """Whether any round was applied."""
        return int(self._last_applied) > 0

    def resolved(self) -> SkipCount:
        """The same count in plain numbers."""
        return SkipCount(self.total, self.in_a_row, applied=self.any_applied)


@dataclass(eq=False, kw_only=True)
class StepRecord:
    """One call of ``step``, resolved to a :class:`StepResult` when it is read."""

    optimizer: weakref.ref[Optimizer]
    found: Held
    """Above 0 if any gradient was not finite."""
    loss: Tensor | None
    loss_scale: Held
    next_loss_scale: Held
    marks: Marks | None
    """Which ones; None if they have to be looked for in the gradients."""
    fresh: bool = True
    """Whether the gradients, if there are any, are still those of this step."""

    @property
    def skipped(self) -> bool:
        """Whether the weights were left alone."""
        return float(self.found) > 0

    @property
    def flag(self) -> Held:
        """1 if skipped, else 0, without waiting."""
        return (self.found > 0).float() if isinstance(self.found, Tensor) else float(self.skipped)

    def nonfinite(self, known: Mapping[Tensor, str]) -> tuple[Reason, tuple[str, ...]]:
        """Why the step was skipped, and whose gradients were not finite, as far as known."""
        optimizer = self.optimizer()
        if self.marks is None and self.fresh and optimizer is not None:
            marks = Marks(optimizer, known, exact=True)
            if marks.read()[1]:  # else the gradients were cleared
                self.marks = marks
        return ("overflow", ()) if self.marks is None else self.marks.read()

    def result(self, known: Mapping[Tensor, str], total: int, in_a_row: int) -> StepResult:
        """Everything in numbers; ``total`` and ``in_a_row`` count this step's round already."""
        skipped = self.skipped
        reason, found = self.nonfinite(known) if skipped else (None, ())
        return StepResult(
            applied=not skipped,
            reason=reason,
            loss=math.nan if self.loss is None else float(self.loss),
            grad_norm=math.nan,
            loss_scale=float(self.loss_scale),
            next_loss_scale=float(self.next_loss_scale),
            skipped_total=total,
            skipped_in_a_row=in_a_row if skipped else 0,
            nonfinite_parameters=found,
        )


def any_skipped(records: Sequence[StepRecord], device: torch.device) -> Held:
    """1 if any of the steps was skipped, else 0, without waiting for a device."""
    flags = [record.flag for record in records]
    numbers = [flag for flag in flags if not isinstance(flag, Tensor)]
    if len(numbers) == len(flags):
        return max(numbers)
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    return total(tensors, device).add(sum(numbers)).clamp(max=1.0)
