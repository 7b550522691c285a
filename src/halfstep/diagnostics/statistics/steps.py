"""Where a step of anybody's loop begins and ends, and where its finished gradients are seen.

A loop tells it by what it calls: ``Precision.step``; or ``optimizer.step``, and with a gradient
scaler ``unscale_`` and ``update``, as an overflowing step never reaches the optimizer. Methods are
replaced on the very object for as long as it is watched, and call the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep.errors import NonFiniteError, SpikeError
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision


class Listener(Protocol):
    """What is told of the steps."""

    @property
    def watching(self) -> bool:
        """Whether the running step is to be measured."""

    def gradient(self, name: str, gradient: Tensor, scale: float) -> None:
        """A parameter's finished gradient, times a loss scale."""

    def before(self, name: str, weight: Tensor, new: bool = False) -> None:
        """A trainable weight before the update; it must be copied to be kept, unless it is new."""

    def after(self, name: str, weight: Tensor) -> None:
        """The same weight after it."""

    def finished(self, applied: Callable[[], bool]) -> None:
        """The step is over; ``applied`` may wait for the device."""


class PrecisionSteps:
    """The steps of a :class:`halfstep.Precision`; weights are its masters, where it has some."""

    def __init__(self, precision: Precision, listener: Listener) -> None:
        """Watch ``precision.step``."""
        self._precision, self._listener = precision, listener
        self._wants_gradients = False
        self._replaced = [
            _Replaced(precision, "step", self._step),
            _Replaced(precision.masters, "gradients", self._gradients),
        ]

    def close(self) -> None:
        """Give the methods back."""
        for replaced in self._replaced:
            replaced.undo()

    def scale(self) -> float:
        """The loss scale of the running backward."""
        return self._precision.loss_scale.value

    def _step(self, original: Callable[..., StepResult], *args: Any, **options: Any) -> StepResult:
        listener = self._listener
        if not listener.watching:
            result = original(*args, **options)
            listener.finished(lambda: result.applied)
            return result
        targets = self._precision.named_parameters()
        for name, weight in self._weights():
            held = local_part(targets[name]).untyped_storage().data_ptr()
            mine = local_part(weight).untyped_storage().data_ptr() != held
            listener.before(name, weight, new=mine)
        self._wants_gradients = True
        try:
            result = original(*args, **options)
        except (NonFiniteError, SpikeError):
            listener.finished(lambda: False)
            raise
        finally:
            self._wants_gradients = False
        if result.applied:
            for name, weight in self._weights():
                listener.after(name, weight)
        listener.finished(lambda: result.applied)
        return result

    def _gradients(self, original: Callable[..., Any], *args: Any) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = original(*args)
        if self._wants_gradients:
            self._wants_gradients = False  # a closure's first evaluation is the step's gradient
            names = {target: name for name, target in self._precision.named_parameters().items()}
            for target, gradient in found.items():
                self._listener.gradient(names[target], gradient, 1.0)
        return found

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, as some are made for it."""
        masters, targets = self._precision.masters, self._precision.named_parameters()
        trained = {n for n, t in targets.items() if masters.parameter_of(t).requires_grad}
        return ((name, weight) for name, weight in masters.items() if name in trained)


class OptimizerSteps:
    """The steps of optimizers, given or found, with or without a gradient scaler.

    Without a scaler a step ends when each given optimizer has stepped, or when one is about to step
    again; with one it ends at ``scaler.update()``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[Tensor, str],
        scaler: Any,
        listener: Listener,
    ) -> None:
        """Watch the optimizers' ``step``, and a scaler's ``unscale_`` and ``update``.

        Args:
            optimizers: All of the loop's; if empty, any that holds a named parameter.
            names: Parameter to name.
            scaler: torch's or halfstep's GradScaler, or None.
            listener: Told of the steps.
        """
        self._optimizers, self._names = optimizers, names
        self._scaler, self._listener = scaler, listener
        self._stepped: list[Optimizer] = []
        self._unscaled: list[Optimizer] = []
        self._flags: list[Tensor] = []  # of fused optimizers, which look for overflow themselves
        self._handles: list[Any]
        if optimizers:
            self._handles = [o.register_step_pre_hook(self._before) for o in optimizers]
            self._handles += [o.register_step_post_hook(self._after) for o in optimizers]
        else:
            self._handles = [register_optimizer_step_pre_hook(self._before)]
            self._handles.append(register_optimizer_step_post_hook(self._after))
        self._replaced: list[_Replaced] = []
        if scaler is not None:
            self._replaced.append(_Replaced(scaler, "unscale_", self._unscale))
            self._replaced.append(_Replaced(scaler, "update", self._update))

    def close(self) -> None:
        """Remove the hooks, and give the methods back."""
        for handle in self._handles:
            handle.remove()
        for replaced in self._replaced:
            replaced.undo()

    def scale(self) -> float:
        """The loss scale of the running backward."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _ours(self, optimizer: Optimizer) -> bool:
        first = (p for group in optimizer.param_groups for p in group["params"])
        return bool(self._optimizers) or any(p in self._names for p in first)

    def _trained(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [(self._names[p], p) for p in held if p in self._names and p.requires_grad]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not self._ours(optimizer):
            return None
        if optimizer in self._stepped and self._scaler is None:
            self._end()
        if not self._listener.watching:
            return None
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self._flags.append(found.detach().clone())
        for name, weight in self._trained(optimizer):
            self._listener.before(name, weight)
        own, *given = args  # torch hands the optimizer itself over as well
        closure, *others = [*given, options.get("closure")]
        if closure is None:
            self._finished(optimizer)
            return None
        measured = _First(closure, partial(self._finished, optimizer))
        if given:
            return (own, measured, *others[:-1]), options
        return args, {**options, "closure": measured}

    @torch.no_grad()
    def _finished(self, optimizer: Optimizer) -> None:
        """Count the gradients that a step takes, unless they were counted as they were unscaled."""
        if optimizer not in self._unscaled:
            scale = getattr(optimizer, "grad_scale", None)
            self._measure(optimizer, 1.0 if scale is None else float(scale))

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if not self._ours(optimizer):
            return
        if self._listener.watching:
            for name, weight in self._trained(optimizer):
                self._listener.after(name, weight)
        self._stepped.append(optimizer)
        if self._scaler is None and all(o in self._stepped for o in self._optimizers):
            self._end()

    def _measure(self, optimizer: Optimizer, scale: float) -> None:
        for name, parameter in self._trained(optimizer):
            if parameter.grad is not None:
                self._listener.gradient(name, parameter.grad, scale)

    @torch.no_grad()
    def _unscale(self, original: Callable[..., Any], optimizer: Any) -> Any:
        bare = bare_optimizer(optimizer)
        if self._listener.watching and self._ours(bare) and bare not in self._unscaled:
            self._measure(bare, self.scale())
            self._unscaled.append(bare)
        return original(optimizer)

    def _update(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        finally:  # halfstep's scaler raises NonFiniteError after a step like any other
            self._end()

    def _end(self) -> None:
        flags, stepped = self._flags, bool(self._stepped)
        self._stepped, self._unscaled, self._flags = [], [], []
        self._listener.finished(lambda: stepped and not any(bool(flag) for flag in flags))


class _First:
    """A closure that makes the gradients itself; the first time it has run, they are the step's."""

    def __init__(self, closure: Callable[[], Any], measure: Callable[[], None]) -> None:
        self._closure, self._measure = closure, measure
        self._due = True

    def __call__(self) -> Any:
        value = self._closure()
        if self._due:
            self._due = False
            self._measure()
        return value


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that are optimizers themselves, such as Accelerate's."""
    while isinstance(inner := vars(optimizer).get("optimizer"), Optimizer):
        optimizer = inner
    return optimizer


class _Replaced:
    """A method that was replaced on one object; the new one gets the old one first."""

    def __init__(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._had = name in vars(owner)  # such as another watch's
        self._old = getattr(owner, name)
        self._new = partial(method, self._old)
        setattr(owner, name, self._new)

    def undo(self) -> None:
        if vars(self._owner).get(self._name) is not self._new:
            return  # somebody has replaced it since, and calls ours
        if self._had:
            setattr(self._owner, self._name, self._old)
        else:
            delattr(self._owner, self._name)
