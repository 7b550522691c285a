"""Where a step of anybody's loop begins and ends, and where its finished gradients are seen.

A loop tells it by what it calls: Precision.step; or optimizer.step, and with a gradient scaler
update, as an overflowing step never reaches the optimizer. Methods are replaced on the very object
for as long as it is watched, and call the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep.diagnostics.lost_updates import optimizers_of
from halfstep.diagnostics.metrics import keep_lines
from halfstep.errors import NonFiniteError, PrecisionError, SpikeError
from halfstep.precision.border import require
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision


class StepListener:
    """What measures some steps of anybody's loop.

    Attributes:
        collector: Takes the running step's weights (``before``, ``after``) and finished gradients
            (``gradient``); None on steps that are not measured.
    """

    collector: Any = None

    def __init__(
        self, who: str, model: nn.Module, source: Any, scaler: Any, every: int, to: Any, start: int
    ) -> None:
        """Check the arguments, which are those of :func:`halfstep.watch`; ``who`` asks."""
        require(model, nn.Module, f"{who}(model)", "a torch.nn.Module")
        for name, number, least in (("every", every, 1), ("start", start, 0)):
            allowed = f"an integer >= {least}"
            if require(number, int, f"{who}({name})", allowed) < least:
                raise PrecisionError(f"{who}({name}={number}); allowed: {allowed}")
        if scaler is None and isinstance(source, Optimizer):
            scaler = vars(source).get("scaler")  # Accelerate's
        self._scaler, self._model, self._every = scaler, bare_model(model), every
        self._precision = source if isinstance(source, Precision) else None
        given = None if self._precision else source
        self._optimizers = [] if given is None else optimizers_of(given, who)
        self._to = None if to is None else Path(to)
        self._step = self._start = start
        self._steps: PrecisionSteps | OptimizerSteps | None = None

    def _begin(self) -> None:
        """Begin the file, or go on with it after the steps of a resumed run; watch the steps."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            self._to = None  # rank 0 writes
        if self._to is not None:
            keep_lines(self._to, self._start)
        if self._precision is not None:
            self._steps = PrecisionSteps(self._precision, self)
        else:
            names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
            self._steps = OptimizerSteps(self._optimizers, names, self._scaler, self)
        self._arm()

    def close(self) -> None:
        """Leave the loop alone again; what was measured can still be read."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._disarm()

    def __exit__(self, *_: object) -> None:
        """Leave the loop alone again; a step that has not ended is not written."""
        self.close()

    def finished(self, applied: Callable[[], bool]) -> None:
        """End a step, and collect the next one if it is to be measured."""
        if self._steps is None:  # a method that was replaced after ours still calls it
            return
        self._step += 1
        if self.collector is not None and not self.collector.empty:
            self._measured(applied())
        self._disarm()
        self._arm()

    def _arm(self) -> None:
        self.collector = self._collect(self._step + 1)

    def _disarm(self) -> None:
        if self.collector is not None:
            self.collector.close()
        self.collector = None

    def _collect(self, step: int) -> Any:
        """A collector for a step, or None."""
        raise NotImplementedError

    def stopped(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Look at the weights at which a run ends."""

    def _measured(self, applied: bool) -> None:
        """Take what was collected of a step that has ended."""
        raise NotImplementedError


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside of DDP and ``torch.compile``, whose names are the user's own."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class PrecisionSteps:
    """The steps of a :class:`halfstep.Precision`; weights are its masters, where it has some."""

    def __init__(self, precision: Precision, listener: StepListener) -> None:
        self._precision, self._listener = precision, listener
        self._wants_gradients = False
        self._replaced = [
            Replaced(precision, "step", self._step),
            Replaced(precision.masters, "gradients", self._gradients),
        ]

    def close(self) -> None:
        """Let Precision's methods be its own again, unless somebody else has replaced them."""
        for replaced in self._replaced:
            replaced.undo()

    def scale(self) -> float:
        """The loss scale of the running backward."""
        return self._precision.loss_scale.value

    def _step(self, original: Callable[..., StepResult], *args: Any, **options: Any) -> StepResult:
        listener = self._listener
        if listener.collector is not None:
            self._wants_gradients = True
            for name, weight in self._weights():
                listener.collector.before(name, local_part(weight).detach())
        try:
            result = original(*args, **options)
        except (NonFiniteError, SpikeError):
            listener.stopped(self._weights())
            listener.finished(lambda: False)
            raise
        finally:
            self._wants_gradients = False
        if listener.collector is not None and result.applied:
            for name, weight in self._weights():
                listener.collector.after(name, local_part(weight).detach())
        listener.finished(lambda: result.applied)
        return result

    def _gradients(self, original: Callable[..., Any], *args: Any) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = original(*args)
        if self._wants_gradients:
            self._wants_gradients = False  # a closure's first evaluation is the step's gradient
            names = {target: name for name, target in self._precision.named_parameters().items()}
            for target, gradient in found.items():
                self._listener.collector.gradient(names[target], gradient.detach(), 1.0)
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
        listener: StepListener,
    ) -> None:
        """Watch the optimizers' ``step``; without optimizers any that holds a named parameter."""
        self._optimizers, self._names = optimizers, names
        self._scaler, self._listener = scaler, listener
        self._stepped: list[Optimizer] = []
        self.ended: list[Optimizer] = []  # those that took the newest step
        self._flags: list[Tensor] = []  # of fused optimizers, which look for overflow themselves
        self._handles: list[Any]
        if optimizers:
            self._handles = [o.register_step_pre_hook(self._before) for o in optimizers]
            self._handles += [o.register_step_post_hook(self._after) for o in optimizers]
        else:
            self._handles = [register_optimizer_step_pre_hook(self._before)]
            self._handles.append(register_optimizer_step_post_hook(self._after))
        self._replaced: list[Replaced] = []
        if scaler is not None:
            self._replaced.append(Replaced(scaler, "update", self._update))

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
        if self._listener.collector is None:
            return None
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self._flags.append(found.detach().clone())
        for name, weight in self._trained(optimizer):
            self._listener.collector.before(name, local_part(weight).detach())
        if not _has_closure(args, options):
            self._measure(optimizer)
        return None

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._ours(optimizer):
            return
        if self._listener.collector is not None:
            if _has_closure(args, options):  # which has made the gradients within the step
                self._measure(optimizer)
            for name, weight in self._trained(optimizer):
                self._listener.collector.after(name, local_part(weight).detach())
        self._stepped.append(optimizer)
        if self._scaler is None and all(o in self._stepped for o in self._optimizers):
            self._end()

    def _measure(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of fused optimizers, which unscale
        for name, parameter in self._trained(optimizer):
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                self._listener.collector.gradient(name, gradient, float(scale or 1.0))

    def _update(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        finally:  # halfstep's scaler raises NonFiniteError after a step like any other
            self._end()

    def _end(self) -> None:
        flags, stepped = self._flags, bool(self._stepped)
        self.ended = self._stepped
        self._stepped, self._flags = [], []
        self._listener.finished(lambda: stepped and not any(bool(flag) for flag in flags))


def _has_closure(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    # torch hands the optimizer itself over as well
    return (args[1] if len(args) > 1 else options.get("closure")) is not None


class Replaced:
    """A method that was replaced on one object; the new one gets the old one first."""

    def __init__(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._had = name in vars(owner)  # such as another watch's
        self._old = getattr(owner, name)
        self._new = partial(method, self._old)
        setattr(owner, name, self._new)

    def undo(self) -> None:
        """Give the old method back, unless somebody has replaced it since."""
        if vars(self._owner).get(self._name) is not self._new:
            return  # who calls ours
        if self._had:
            setattr(self._owner, self._name, self._old)
        else:
            delattr(self._owner, self._name)
