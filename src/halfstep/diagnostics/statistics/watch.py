"""``halfstep.watch``: statistics of the weights, activations and gradients of a model.

It is a context around anybody's loop. Every so many steps it counts, for each tensor, how many
numbers have which binary exponent; the other steps run without its hooks. Weights and losses are
bit for bit those of a run without it, wherever a model computes the same with hooks as without.
Where compiled kernels compute a block of halfstep's own GPT, a watched step is torch's instead.
``docs/watch.md`` says how to read what it shows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from halfstep.diagnostics.metrics import NUMERICS, append_line
from halfstep.diagnostics.statistics.steps import StepListener
from halfstep.diagnostics.statistics.values import Collector, Kind, TensorStatistics
from halfstep.diagnostics.statistics.what_if import (
    FLUSHED_AT_MOST,
    as_format,
    beyond,
    what_if,
    window,
)
from halfstep.errors import DataError
from halfstep.formats import FloatFormat
from halfstep.precision.step import Precision
from halfstep.shown import aligned

_SPELLED = {"activation_gradient": "gradient of output", "gradient": "gradient of weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumerics:
    """What is known of the numbers of one watched step; ``print`` shows it as a table."""

    step: int
    """Number of the step, from 1; skipped steps count."""
    applied: bool
    """Whether the weights were updated."""
    loss_scale: float
    """The loss scale of its backward."""
    policy: str
    """The precision policy, or empty in a loop without one."""
    tensors: tuple[TensorStatistics, ...]
    """In the order in which their first numbers were counted."""

    def of(self, *kinds: Kind) -> tuple[TensorStatistics, ...]:
        """The tensors of some kinds."""
        return tuple(one for one in self.tensors if one.kind in kinds)

    def verdicts(self, form: FloatFormat | str = "fp16") -> tuple[str, ...]:
        """What a format would make of the numbers, in sentences."""
        form, said = as_format(form), []
        over = [one for one in self.of("activation", "weight") if beyond(one.absmax, form)]
        if over:
            most = max(over, key=lambda one: one.absmax)
            said.append(
                f"{form.name} would overflow in {len(over)} weights and outputs, most in "
                f"{_title(most)}, whose largest magnitude is {most.absmax:.3g} where {form.name} "
                f"ends at {form.max:g}"
            )
        gradients = self._in_16_bits()
        fit = window(gradients, form)
        if fit is None:
            return tuple(said)
        said.append(f"{form.name} gradients: {fit}")
        lost = sum(what_if(one, form).flushed * one.nonzero for one in gradients)
        flushed = lost / sum(one.nonzero for one in gradients)
        if flushed > FLUSHED_AT_MOST:
            said[-1] += f"; without a scale {flushed:.1%} of them would be flushed to 0"
        return tuple(said)

    def _in_16_bits(self) -> tuple[TensorStatistics, ...]:
        """The gradients that a 16-bit format would hold.

        Of outputs, those that are in 16 bits now, or all where none is: a mixed policy leaves the
        others in fp32. Of weights, all: a 16-bit matmul makes them, whatever they are kept in.
        """
        outputs = self.of("activation_gradient")
        low = tuple(one for one in outputs if one.dtype in ("bfloat16", "float16"))
        return (*(low or outputs), *self.of("gradient"))

    def table(self, form: FloatFormat | str = "fp16", rows: int = 12) -> str:
        """The tensors that a format would treat worst, and the verdicts.

        Args:
            form: The format of the what-if, or its name.
            rows: How many tensors.

        Returns:
            Text with one line for each tensor.
        """
        form = as_format(form)

        def badness(one: TensorStatistics) -> tuple[float, float, float]:
            found = what_if(one, form)
            return (one.nan + one.inf) / max(one.elements, 1), found.overflowed, found.flushed

        chosen = sorted(self.tensors, key=badness, reverse=True)[:rows]
        lines = [
            (
                *("tensor", "dtype", "elements", "largest", "rms", "zero", "not finite"),
                *(f"{form.name}: flushed", f"{form.name}: overflow", "scales that fit"),
            ),
            *(_line(one, form) for one in chosen),
        ]
        head = (
            f"step {self.step}{'' if self.applied else ' (skipped)'}, loss scale "
            f"{self.loss_scale:g}{', ' + self.policy if self.policy else ''}: "
            f"{len(chosen)} of {len(self.tensors)} tensors"
        )
        table = aligned(lines, range(1, len(lines[0])))
        return "\n".join([head, table, *self.verdicts(form)])

    def __str__(self) -> str:
        return self.table()


def _step(line: str) -> StepNumerics:
    table: Any = json.loads(line)
    read = {field.name: table[field.name] for field in fields(StepNumerics)}
    read["tensors"] = tuple(map(_tensor, read["tensors"]))
    return StepNumerics(**read)


def _tensor(table: Mapping[str, Any]) -> TensorStatistics:
    read = {field.name: table[field.name] for field in fields(TensorStatistics)}
    read["exponents"] = {int(e): n for e, n in read["exponents"].items()}
    return TensorStatistics(**read)


def load_numerics(path: str | Path) -> tuple[StepNumerics, ...]:
    """Read ``numerics.jsonl``; lines that are cut or damaged are left out.

    Args:
        path: The file, or the folder of a run that was trained with ``--watch``.

    Returns:
        The steps that could be read, in order.

    Raises:
        DataError: If there is no such file, or it cannot be read.
    """
    file = Path(path)
    file = file / NUMERICS if file.is_dir() else file
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}; allowed: a file that halfstep.watch(to=...) wrote, or the "
            "folder of a run that was trained with --watch"
        ) from error
    steps = []
    for line in lines:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            steps.append(_step(line))
    return tuple(steps)


def _title(one: TensorStatistics) -> str:
    return f"{_SPELLED.get(one.kind, one.kind)} {one.name}"


def _line(one: TensorStatistics, form: FloatFormat) -> tuple[str, ...]:
    found = what_if(one, form)
    fit = window([one], form) if one.kind in ("gradient", "activation_gradient") else None
    scales = ""
    if fit is not None:
        scales = f"2^{fit.low} to 2^{fit.high}" if fit.fits else "none"
    return (
        _title(one),
        one.dtype,
        f"{one.elements:,}",
        f"{one.absmax:.2g}",
        f"{one.rms:.2g}",
        f"{one.zeros / max(one.elements, 1):.1%}",
        f"{one.nan + one.inf:,}",
        f"{found.flushed:.1%}",
        f"{found.overflowed:.1%}",
        scales,
    )


class watch(StepListener):
    """Counts the exponents of a model's weights, activations and gradients in a loop.

    Use it as a context around the loop; :meth:`report` gives the newest watched step as values, and
    ``print`` shows what fp16 would make of it. The first step and every ``every``-th are watched.
    With several ranks each counts its own numbers, and rank 0 writes the file.

    Args:
        model: The model that is trained; modules that ``torch.compile`` runs show no activations.
        source: The loop's :class:`halfstep.Precision`, its optimizer, or all of several that step
            in turn. None: any optimizer that holds one of the model's parameters.
        scaler: The loop's gradient scaler (torch's or halfstep's), where it has one: gradients are
            shown without its scale, and steps that it skips are counted.
        every: Watch every this many steps, skipped ones included.
        to: A file that gets one line of JSON for each watched step: ``numerics.jsonl``.
        start: Steps before this context's first, in a resumed run: the file goes on after them.

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

    def __init__(
        self,
        model: nn.Module,
        source: Precision | Optimizer | Sequence[Optimizer] | None = None,
        *,
        scaler: Any = None,
        every: int = 100,
        to: str | Path | None = None,
        start: int = 0,
    ) -> None:
        super().__init__("watch", model, source, scaler, every, to, start)
        self._last: StepNumerics | None = None

    def __enter__(self) -> Self:
        """Watch the loop's steps from now on.

        Raises:
            CheckpointError: If the file of ``to`` cannot be written.
        """
        if self._steps is None:
            self._begin()
        return self

    def report(self) -> StepNumerics | None:
        """The newest watched step, of this process; None before the first has ended."""
        return self._last

    def __str__(self) -> str:
        return str(self._last or "no step has been watched yet")

    def _collect(self, step: int) -> Collector | None:
        watched = self._steps is not None and (step % self._every == 0 or step == 1)
        return Collector(self._model, self._steps.scale) if watched and self._steps else None

    def _measured(self, applied: bool) -> None:
        collector = self.collector
        self._last = StepNumerics(
            step=self._step,
            applied=applied,
            loss_scale=collector.scale,
            policy="" if self._precision is None else str(self._precision.policy),
            tensors=tuple(collector.read()),
        )
        if self._to is not None:
            append_line(self._to, asdict(self._last))
