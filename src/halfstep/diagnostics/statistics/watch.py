"""``halfstep.watch``: statistics of the weights, activations, gradients and updates of a model.

It is a context around anybody's loop. Every so many steps it counts, for each tensor, how many
numbers have which binary exponent; the other steps run without its hooks. Weights and losses are
bit for bit those of a run without it, wherever a model computes the same with hooks as without.
halfstep's own GPT does: its kernels serve hooks that only look (``kernels/onlookers.py``).
``docs/watch.md`` says how to read what it shows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.diagnostics.statistics.collect import Collector
from halfstep.diagnostics.statistics.numerics import StepNumerics
from halfstep.diagnostics.statistics.over_ranks import over_ranks
from halfstep.diagnostics.statistics.steps import OptimizerSteps, PrecisionSteps, bare_optimizer
from halfstep.errors import CheckpointError, DataError, PrecisionError
from halfstep.files import write_whole
from halfstep.formats import FloatFormat, block_format
from halfstep.precision.agreement import ManyRanks, as_ranks, ranks_of_this_process
from halfstep.precision.border import require
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.scaling.gradients import Ranks
from halfstep.precision.step import Precision
from halfstep.shown import as_html

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
        ranks: Ranks,
        formats: Sequence[str] = (),
    ) -> None:
        """Use :func:`watch`, which checks the arguments."""
        self._formats = formats
        self._model, self._source, self._scaler = bare_model(model), source, scaler
        self._every, self._to, self._start, self._ranks = every, to, start, ranks
        self._step = start
        self._steps: PrecisionSteps | OptimizerSteps | None = None
        self._collector: Collector | None = None
        self._before: dict[str, Tensor] = {}
        self._parts: dict[str, int] = {}
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """The newest watched step, over all ranks on rank 0; None before the first has ended."""
        return self._last

    def table(self, form: FloatFormat | str = "fp16", *, k: int = 0, rows: int | None = 12) -> str:
        """The newest watched step as text: see :meth:`StepNumerics.table`."""
        return _NOTHING if self._last is None else self._last.table(form, k=k, rows=rows)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return as_html(_NOTHING) if self._last is None else self._last._repr_html_()

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
            self._collector = Collector(self._model, self._steps.scale, self._formats)
            if isinstance(self._source, Precision):
                parameters = self._source.masters.parameter_of
                named = self._source.named_parameters().items()
                self._parts = {n: self._ranks.parts_of(parameters(p)) for n, p in named}
            else:
                named_own = self._model.named_parameters()
                self._parts = {name: self._ranks.parts_of(p) for name, p in named_own}

    def _disarm(self) -> None:
        if self._collector is not None:
            self._collector.close()
        self._collector, self._before = None, {}

    def _write(self, collector: Collector, applied: bool) -> None:
        assert self._steps is not None, "it ends with its steps"
        scale = collector.scale
        tensors = over_ranks(
            [one for one in collector.read() if applied or one.kind != "update"],
            lambda name: self._parts.get(name, 1),
            self._ranks,
            _device(self._model),
        )
        self._last = StepNumerics(
            step=self._step,
            applied=applied,
            loss_scale=scale if math.isfinite(scale) else math.nan,
            policy=str(self._source.policy) if isinstance(self._source, Precision) else "",
            tensors=tuple(tensors),
            products=tuple(collector.products()),
        )
        if self._to is not None:
            try:
                with self._to.open("a", encoding="utf-8") as file:
                    file.write(self._last.to_json() + "\n")
            except OSError as error:  # the step has been taken: its loop must not lose it
                text = f"{self._to}: cannot be written: {error}; the watch goes on without its file"
                warnings.warn(text, stacklevel=2)
                self._to = None

    def _begin_file(self) -> None:
        """Start the file, or go on with it after the steps that a resumed run had taken."""
        if self._to is None:
            return
        try:
            if self._start and self._to.is_file():
                old = self._to.read_text(encoding="utf-8", errors="replace").splitlines()
                write_whole(self._to, "".join(f"{s}\n" for s in old if _until(s, self._start)))
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
    ranks: Ranks | None = None,
    formats: Sequence[str] = (),
) -> Watch:
    """Count the exponents of a model's weights, activations, gradients and updates in a loop.

    Use it as a context around the loop, which stays as it is. The first step and every
    ``every``-th are watched; all others run as ever.

    Args:
        model: The model that is trained; modules that ``torch.compile`` runs show no activations.
        source: The loop's :class:`halfstep.Precision`, its optimizer, or all of several that step
            in turn. None: any optimizer that holds one of the model's parameters, for loops that
            make it themselves; each step of each is a step then.
        scaler: The loop's gradient scaler (torch's or halfstep's), where it has one: gradients are
            shown without its scale, and steps that it skips are counted.
        every: Watch every this many steps, skipped ones included.
        to: A file that gets one line of JSON for each watched step: ``numerics.jsonl``. It is begun
            anew, unless ``start`` is above 0. Where it can no longer be written, as on a full disk,
            the loop goes on with one warning.
        start: Steps before this context's first, in a resumed run, which watches those that the
            whole run would; later lines of the file are dropped.
        ranks: The ranks whose counts are merged, which must all watch. None: those of the
            Precision, or all of ``torch.distributed``'s default group. Rank 0 writes the file.
        formats: Names of block formats, as ``("mxfp8", "nvfp4")``: some rows of each tensor are
            rounded to them on each rank's own, and rank 0's relative errors are in ``rounding``.
            Of names that are recipes, ``products`` of the report has what each would change of
            the products of each linear layer.

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
    for name, number, least in (("every", every, 1), ("start", start, 0)):
        require(number, int, f"watch({name})", f"an integer >= {least}")
        if number < least:
            raise PrecisionError(f"watch({name}={number}); allowed: an integer >= {least}")
    held = vars(source).get("scaler") if isinstance(source, Optimizer) else None  # Accelerate's
    scaler = held if scaler is None else scaler
    if isinstance(source, Precision) and scaler is not None:
        raise PrecisionError(
            "watch(scaler): a Precision has its own loss scale; leave the scaler out"
        )
    for method in ("unscale_", "update", "get_scale") if scaler is not None else ():
        if not callable(getattr(scaler, method, None)):
            raise PrecisionError(
                f"watch(scaler={scaler!r:.80}) has no {method}(); allowed: a torch.amp.GradScaler, "
                "a halfstep.GradScaler, or None"
            )
    if not isinstance(source, Precision):
        source = [bare_optimizer(one) for one in _optimizers(source)]
    if ranks is not None:
        ranks = as_ranks(ranks)
    elif isinstance(source, Precision):
        ranks = source.ranks
    else:
        ranks = ranks_of_this_process(_device(model))
    first = not isinstance(ranks, ManyRanks) or dist.get_rank() == 0
    path = Path(to) if to is not None and first else None
    if isinstance(formats, str):
        formats = (formats,)
    names = [block_format(form).name for form in formats]
    return Watch(model, source, scaler, every, path, start, ranks, names)


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


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


def _until(line: str, last: int) -> bool:
    try:
        return StepNumerics.from_json(line).step <= last
    except DataError:
        return False
