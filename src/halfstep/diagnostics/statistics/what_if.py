"""What another format would make of a tensor's numbers, from their exponents alone.

Rounding to a format flushes to 0 what lies at or below half of its smallest subnormal number, and
overflows what rounds to more than its largest. Both limits are known, and so is the number of
elements in each binade (from 2^e to 2^(e+1)). Multiplying by 2^k only moves the exponents by k, so
one histogram answers for every loss scale that is a power of two::

    flushed    exponents + k below that of half the smallest subnormal: 2^-25 for fp16
    overflowed exponents + k above that of the largest number, and a part of its own binade, if the
               largest element is beyond the limit

The answers are exact but for numbers that share a binade with a limit; there they are what an even
spread would give.

**Source:** IEEE 754-2019, 4.3.1 (roundTiesToEven) and 7.4 (overflow); Micikevicius et al. 2018,
"Mixed Precision Training", section 3.2, for the figure and the loss scale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.diagnostics.statistics.values import TensorStatistics
from halfstep.errors import PrecisionError
from halfstep.formats import FORMATS, FloatFormat

FLUSHED_AT_MOST = 0.01
"""The share of the numbers that a loss scale may leave to be flushed.

**Source:** halfstep's choice; Micikevicius et al. 2018, section 3.2, trained with a few per cent
flushed, and lost accuracy where about two thirds were.
"""


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


def window(several: Sequence[TensorStatistics], form: FloatFormat | str = "fp16") -> Window | None:
    """The loss scales 2^k at which gradients fit a format; None where all their numbers are 0.

    At most one per cent of all numbers together is flushed, so that a bias whose gradient is
    nothing but rounding noise does not count as much as a layer; and none of any tensor overflows.

    Args:
        several: The statistics of gradients, which must be finite to be of use.
        form: The format in which they would be.

    Raises:
        PrecisionError: If there is no format of that name.
    """
    form = as_format(form)
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
