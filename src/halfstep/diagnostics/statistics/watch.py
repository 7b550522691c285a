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
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from halfstep.diagnostics.metrics import NUMERICS, append_line
from halfstep.diagnostics.statistics.steps import StepListener
from halfstep.diagnostics.statistics.values import Collector, Kind, TensorStatistics
from halfstep.errors import DataError, PrecisionError
from halfstep.formats import FORMATS, FloatFormat
from halfstep.precision.step import Precision
from halfstep.shown import aligned

_SPELLED = {"activation_gradient": "gradient of output", "gradient": "gradient of weight"}
FLUSHED_AT_MOST = 0.01
"""The share of the numbers that a loss scale may leave to be flushed.

**Source:** halfstep's choice; Micikevicius et al. 2018, section 3.2, trained with a few per cent
flushed, and lost accuracy where about two thirds were.
"""


# What another format would make of a tensor's numbers, from their exponents alone.
#
# Rounding to a format flushes to 0 what lies at or below half of its smallest subnormal number,
# and overflows what rounds to more than its largest. Both limits are known, and so is the number
# of elements in each binade (from 2^e to 2^(e+1)). Multiplying by 2^k only moves the exponents by
# k, so one histogram answers for every loss scale that is a power of two::
#
#     flushed    exponents + k below that of half the smallest subnormal: 2^-25 for fp16
#     overflowed exponents + k above that of the largest number, and a part of its own binade, if
#                the largest element is beyond the limit
#
# The answers are exact but for numbers that share a binade with a limit; there they are what an
# even spread would give.
#
# **Source:** IEEE 754-2019, 4.3.1 (roundTiesToEven) and 7.4 (overflow); Micikevicius et al. 2018,
# "Mixed Precision Training", section 3.2, for the figure and the loss scale.


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What rounding to a format, after multiplying by 2^k, does to a tensor's finite numbers.

    Attributes:
        flushed: Share of the numbers other than 0 that become 0.
        overflowed: Share beyond the largest number: infinite in fp16 and e5m2, NaN in e4m3, the
            largest number in e2m1.
    """

    flushed: float
    overflowed: float


@dataclass(frozen=True, slots=True)
class Window:
    """The loss scales 2^k that fit a tensor, or several: from ``low`` to ``high``, both included.

    Attributes:
        low: The smallest k at which at most one per cent of the numbers is flushed.
        high: The largest k at which none overflows.
        high_name: The tensor that sets ``high``.
    """

    low: int
    high: int
    high_name: str

    @property
    def fits(self) -> bool:
        """Whether any scale fits."""
        return self.low <= self.high

    def __str__(self) -> str:
        if self.fits:
            return f"loss scales from 2^{self.low} to 2^{self.high} fit"
        return (
            f"no scale fits: at least 2^{self.low} is needed, and {self.high_name} allows "
            f"2^{self.high} at most"
        )


def what_if(values: TensorStatistics, form: FloatFormat | str, k: int = 0) -> WhatIf:
    """What a tensor's numbers times 2^k become when they are rounded to a format.

    Args:
        values: The tensor's statistics.
        form: The format, such as :data:`halfstep.formats.FP16`, or its name.
        k: The exponent of the loss scale.

    Returns:
        The shares that are flushed and overflowed.

    Example:
        >>> tiny = TensorStatistics(kind="gradient", name="w", dtype="float32", elements=4,
        ...     absmax=2e-8, rms=1e-8, zeros=1, nan=0, inf=0, exponents={-26: 3})
        >>> what_if(tiny, "fp16").flushed, what_if(tiny, "fp16", 10).flushed
        (1.0, 0.0)
    """
    form = as_format(form)
    flushed = _flushed(values, form, k)
    whole = max(values.nonzero, 1)
    return WhatIf(flushed / whole, _overflowing(values, form, k) / whole)


def _flushed(values: TensorStatistics, form: FloatFormat, k: int) -> int:
    """How many elements times 2^k round to 0."""
    half = form.min_exponent - form.mantissa_bits - 1  # the exponent of what is flushed at most
    # Half of the smallest subnormal goes to 0, the even one; it is counted where nothing in its
    # binade is larger, as of equal gradients.
    tie = values.absmax == math.ldexp(1.0, half - k)
    return sum(n for e, n in values.exponents.items() if e + k < half + tie)


def _overflowing(values: TensorStatistics, form: FloatFormat, k: int) -> float:
    """How many elements times 2^k round to more than the largest number."""
    if not beyond(values.absmax, form, k):
        return 0
    top = math.frexp(form.max)[1] - 1
    above = sum(n for e, n in values.exponents.items() if e + k > top)
    inside = values.exponents.get(top - k, 0)
    # Of the limit's own binade, the part above the limit, as if its numbers were spread evenly.
    start, limit = math.ldexp(1.0, top - k), math.ldexp(_limit(form), -k)
    end = min(values.absmax, 2 * start)
    part = (end - limit) / (end - start) if end > limit else 0.0
    return above + max(inside * part, float(above == 0))


def _limit(form: FloatFormat) -> float:
    """Half-way from the largest number to what would follow it."""
    return form.max + form.ulp(form.max) / 2


def beyond(magnitude: float, form: FloatFormat, k: int = 0) -> bool:
    """Whether a magnitude times 2^k overflows when it is rounded to a format."""
    limit = _limit(form)
    if magnitude and math.frexp(magnitude)[1] + k > math.frexp(limit)[1]:
        return True  # where ldexp may overflow
    value = math.ldexp(magnitude, k)
    # A tie goes to the even neighbour: e4m3's largest has an even mantissa, the others' an odd one.
    return value > limit or (value == limit and not (form.finite_only and form.has_nan))


def window(several: Sequence[TensorStatistics], form: FloatFormat) -> Window | None:
    """The loss scales 2^k at which gradients fit a format; None where all their numbers are 0.

    At most one per cent of all numbers together is flushed, so that a bias whose gradient is
    nothing but rounding noise does not count as much as a layer; and none of any tensor overflows.

    Args:
        several: The statistics of gradients, which must be finite to be of use.
        form: The format in which they would be.
    """
    counts: Counter[int] = Counter()
    for one in several:
        counts.update(one.exponents)
    if not counts:
        return None
    most = max(several, key=lambda one: one.absmax)
    allowed, seen, low = FLUSHED_AT_MOST * counts.total(), 0, 0
    for e in sorted(counts):
        seen += counts[e]
        if seen > allowed:
            low = form.min_exponent - form.mantissa_bits - 1 - e  # this binade must not be flushed
            break
    low += sum(_flushed(one, form, low) for one in several) > allowed  # the ties at its lower end
    high = math.frexp(_limit(form))[1] - math.frexp(most.absmax)[1] + 1
    while beyond(most.absmax, form, high):
        high -= 1
    return Window(low, high, most.name)


def as_format(form: FloatFormat | str) -> FloatFormat:
    """A format by its name; ``e4m3`` is short for ``e4m3fn``."""
    if isinstance(form, FloatFormat):
        return form
    found = FORMATS.get({"e4m3": "e4m3fn"}.get(str(form), str(form)))
    if found is None:
        raise PrecisionError(
            f"there is no format {form!r}; allowed: {', '.join(FORMATS)}, or a FloatFormat"
        )
    return found


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
