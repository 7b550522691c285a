"""``halfstep.watch``: statistics of the weights, activations, gradients and updates of a model.

It is a context around anybody's loop. Every so many steps it counts, for each tensor, how many
numbers have which binary exponent; the other steps run without its hooks. Weights and losses are
bit for bit those of a run without it, wherever a model computes the same with hooks as without.
Where compiled kernels compute a block of halfstep's own GPT, a watched step is torch's instead.
``docs/watch.md`` says how to read what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep.diagnostics.metrics import keep_lines
from halfstep.diagnostics.statistics.numerics import StepNumerics
from halfstep.diagnostics.statistics.values import Collector, Kind
from halfstep.errors import (
    CheckpointError,
    NonFiniteError,
    PrecisionError,
    SpikeError,
)
from halfstep.formats import FloatFormat
from halfstep.precision.border import require
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision

_NOTHING = "no step has been watched yet"


class Watch:
    """The context that :func:`watch` makes; it can be read inside and afterwards."""

    def __init__(
        self,
        model: nn.Module,
        source: Precision | Sequence[Optimizer],
        scaler: Any,
        every: int,
        to: Path | None,
        start: int,
    ) -> None:
        self._model, self._source, self._scaler = bare_model(model), source, scaler
        self._every, self._to, self._start = every, to, start
        self._step = start
        self._steps: PrecisionSteps | OptimizerSteps | None = None
        self._collector: Collector | None = None
        self._before: dict[str, Tensor] = {}
        self._last: StepNumerics | None = None

    def __enter__(self) -> Self:
        """Watch the loop's steps from now on.

        Raises:
            CheckpointError: If the file of ``to`` cannot be written.
            PrecisionError: If this context is entered a second time.
        """
        if self._steps is not None:
            raise PrecisionError("this watch is running already: make another one")
        self._begin_file()
        parameters = self._model.named_parameters()
        if isinstance(self._source, Precision):
            self._steps = PrecisionSteps(self._source, self)
        else:
            names: Mapping[Tensor, str] = {p: name for name, p in parameters}
            self._steps = OptimizerSteps(self._source, names, self._scaler, self)
        self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the loop alone again; a step that has not ended is not written."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._disarm()

    @property
    def watching(self) -> bool:
        """Whether the running step is watched."""
        return self._collector is not None

    def report(self) -> StepNumerics | None:
        """The newest watched step, of this process; None before the first has ended."""
        return self._last

    def table(self, form: FloatFormat | str = "fp16", *, k: int = 0, rows: int | None = 12) -> str:
        """The newest watched step as text: see :meth:`StepNumerics.table`."""
        return _NOTHING if self._last is None else self._last.table(form, k=k, rows=rows)

    def __str__(self) -> str:
        return self.table()

    # What the loop's steps tell.

    def gradient(self, name: str, gradient: Tensor, scale: float) -> None:
        """Count a parameter's finished gradient."""
        if self._collector is not None:
            self._collector.add("gradient", name, gradient.detach(), scale)

    def before(self, name: str, weight: Tensor, new: bool = False) -> None:
        """Count a weight, and keep it until the step's end, as a copy unless it is new memory."""
        if self._collector is not None:
            local = local_part(weight).detach()
            self._collector.add("weight", name, local)
            self._before[name] = local if new else local.clone()

    def after(self, name: str, weight: Tensor) -> None:
        """Count how the step changed a weight."""
        before = self._before.pop(name, None)
        if self._collector is not None and before is not None:
            self._collector.add_update(name, local_part(weight), before)

    def finished(self, applied: Callable[[], bool]) -> None:
        """End a step, and attach hooks if the next one is to be watched."""
        if self._steps is None:  # a method that another watch replaced after ours still calls it
            return
        self._step += 1
        collector = self._collector
        if collector is not None and not collector.empty:
            self._write(collector, applied())
        self._disarm()
        self._arm()

    def _arm(self) -> None:
        due = self._step + 1
        if self._steps is not None and (due % self._every == 0 or due == 1):
            self._collector = Collector(self._model, self._steps.scale)

    def _disarm(self) -> None:
        if self._collector is not None:
            self._collector.close()
        self._collector, self._before = None, {}

    def _write(self, collector: Collector, applied: bool) -> None:
        assert self._steps is not None, "it ends with its steps"
        scale = collector.scale
        tensors = [one for one in collector.read() if applied or one.kind != "update"]
        self._last = StepNumerics(
            step=self._step,
            applied=applied,
            loss_scale=scale if math.isfinite(scale) else math.nan,
            policy=str(self._source.policy) if isinstance(self._source, Precision) else "",
            tensors=tuple(tensors),
        )
        if self._to is not None:
            with self._to.open("a", encoding="utf-8") as file:
                file.write(self._last.to_json() + "\n")

    def _begin_file(self) -> None:
        """Start the file, or go on with it after the steps that a resumed run had taken."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            self._to = None  # rank 0 writes
        if self._to is None:
            return
        try:
            if self._start and self._to.is_file():
                keep_lines(self._to, self._start)
            else:
                self._to.write_text("", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{self._to}: cannot be written: {error}") from error


def watch(
    model: nn.Module,
    source: Precision | Optimizer | Sequence[Optimizer] | None = None,
    *,
    scaler: Any = None,
    every: int = 100,
    to: str | Path | None = None,
    start: int = 0,
) -> Watch:
    """Count the exponents of a model's weights, activations, gradients and updates in a loop.

    Use it as a context around the loop. The first step and every ``every``-th are watched. With
    several ranks each counts its own numbers, and rank 0 writes the file.

    Args:
        model: The model that is trained; modules that ``torch.compile`` runs show no activations.
        source: The loop's :class:`halfstep.Precision`, its optimizer, or all of several that step
            in turn. None: any optimizer that holds one of the model's parameters.
        scaler: The loop's gradient scaler (torch's or halfstep's), where it has one: gradients are
            shown without its scale, and steps that it skips are counted.
        every: Watch every this many steps, skipped ones included.
        to: A file that gets one line of JSON for each watched step: ``numerics.jsonl``.
        start: Steps before this context's first, in a resumed run: the file goes on after them.

    Returns:
        The context. Its ``report()`` gives the newest watched step as values, and ``print`` shows
        what fp16 would make of it.

    Raises:
        PrecisionError: If an argument is not one of these.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(model, optimizer, every=1) as watched:
        ...     model(torch.ones(8, 4)).sum().backward()
        ...     optimizer.step()
        >>> [(one.kind, one.name, one.absmax) for one in watched.report().of("gradient")]
        [('gradient', 'weight', 8.0), ('gradient', 'bias', 8.0)]
    """
    require(model, nn.Module, "watch(model)", "a torch.nn.Module")
    _require_at_least("every", every, 1)
    _require_at_least("start", start, 0)
    if scaler is None and isinstance(source, Optimizer):
        scaler = vars(source).get("scaler")  # Accelerate's
    _require_scaler(source, scaler)
    if not isinstance(source, Precision):
        source = [bare_optimizer(one) for one in _optimizers(source)]
    return Watch(model, source, scaler, every, None if to is None else Path(to), start)


def _require_at_least(name: str, number: object, least: int) -> None:
    if require(number, int, f"watch({name})", f"an integer >= {least}") < least:
        raise PrecisionError(f"watch({name}={number}); allowed: an integer >= {least}")


def _require_scaler(source: object, scaler: Any) -> None:
    if scaler is None:
        return
    if isinstance(source, Precision):
        raise PrecisionError(
            "watch(scaler): a Precision has its own loss scale; leave the scaler out"
        )
    for method in ("unscale_", "update", "get_scale"):
        if not callable(getattr(scaler, method, None)):
            raise PrecisionError(
                f"watch(scaler={scaler!r:.80}) has no {method}(); allowed: a torch.amp.GradScaler, "
                "a halfstep.GradScaler, or None"
            )


def _optimizers(source: object) -> Sequence[Optimizer]:
    several = [source] if isinstance(source, Optimizer) else source
    if several is None:
        return ()
    if isinstance(several, list | tuple) and all(isinstance(o, Optimizer) for o in several):
        return several
    raise PrecisionError(
        f"watch(source={source!r:.80}); allowed: a halfstep.Precision, an optimizer, a list of "
        "them, or None"
    )


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside of DDP and ``torch.compile``, whose names are the user's own."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


# Where a step of anybody's loop begins and ends, and where its finished gradients are seen.
#
# A loop tells it by what it calls: Precision.step; or optimizer.step, and with a gradient scaler
# unscale_ and update, as an overflowing step never reaches the optimizer. Methods are replaced on
# the very object for as long as it is watched, and call the original.


class PrecisionSteps:
    """The steps of a :class:`halfstep.Precision`; weights are its masters, where it has some."""

    def __init__(self, precision: Precision, listener: Watch) -> None:
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
        listener: Watch,
    ) -> None:
        """Watch the optimizers' ``step``; without optimizers any that holds a named parameter."""
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
        if not _has_closure(args, options):
            self._measure(optimizer)
        return None

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._ours(optimizer):
            return
        if self._listener.watching:
            if _has_closure(args, options):  # which has made the gradients within the step
                self._measure(optimizer)
            for name, weight in self._trained(optimizer):
                self._listener.after(name, weight)
        self._stepped.append(optimizer)
        if self._scaler is None and all(o in self._stepped for o in self._optimizers):
            self._end()

    def _measure(self, optimizer: Optimizer) -> None:
        """Count the gradients that a step takes, unless they were counted as they were unscaled."""
        if optimizer in self._unscaled:
            return
        scale = getattr(optimizer, "grad_scale", None)
        self._count(optimizer, 1.0 if scale is None else float(scale))

    def _count(self, optimizer: Optimizer, scale: float) -> None:
        for name, parameter in self._trained(optimizer):
            if parameter.grad is not None:
                self._listener.gradient(name, parameter.grad, scale)

    @torch.no_grad()
    def _unscale(self, original: Callable[..., Any], optimizer: Any) -> Any:
        bare = bare_optimizer(optimizer)
        if self._listener.watching and self._ours(bare) and bare not in self._unscaled:
            self._count(bare, self.scale())
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


def _has_closure(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    # torch hands the optimizer itself over as well
    return (args[1] if len(args) > 1 else options.get("closure")) is not None


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


_Key = tuple[Kind, str, torch.dtype, torch.device, float]
