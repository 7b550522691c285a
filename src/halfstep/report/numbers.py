"""What a page shows of the numbers of each layer: a map of their exponents, and what-if tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.diagnostics.statistics.numerics import StepNumerics
from halfstep.diagnostics.statistics.values import Kind, TensorStatistics
from halfstep.diagnostics.statistics.what_if import what_if
from halfstep.formats import FP16

KINDS: Sequence[Kind] = ("activation", "activation_gradient", "gradient", "update")
FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")
MOST_ROWS = 48
"""Tensors of a map; of a deeper model every n-th layer is shown, so that it stays one screen."""
_LEAST, _MOST = -60, 40
"""Exponents beyond these are drawn at the edge."""
FLUSHED_BELOW = math.log2(FP16.min_subnormal) - 1  # halves of it are rounded to even, which is 0
FEWER_DIGITS_BELOW = math.log2(FP16.min_normal)
OVERFLOW_FROM = 16.0  # 65,520 and above round to infinity


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One tensor: what share of its numbers that are not 0 has which exponent."""

    name: str
    cells: Sequence[tuple[int, float]]
    largest: float
    zeros: float


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The tensors of one kind, by exponent from ``low`` to ``high``."""

    kind: Kind
    rows: Sequence[HeatRow]
    low: int
    high: int
    left_out: int
    """Tensors that are not shown."""

    @property
    def limits(self) -> list[float]:
        """Where fp16 rounds to zero, has fewer digits, and overflows, inside of the map."""
        lines = (FLUSHED_BELOW, FEWER_DIGITS_BELOW, OVERFLOW_FROM)
        return [line for line in lines if self.low <= line <= self.high + 1]


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """What each of :data:`FORMATS` would make of a tensor: shares flushed and overflowed."""

    kind: Kind
    name: str
    largest: float
    shares: Sequence[tuple[float, float]]


def heat_maps(step: StepNumerics) -> list[HeatMap]:
    """The maps of a watched step, one for each kind of tensor that it has."""
    return [heat for kind in KINDS if (heat := _map(kind, step.of(kind))) is not None]


def _map(kind: Kind, tensors: Sequence[TensorStatistics]) -> HeatMap | None:
    shown = [tensor for tensor in tensors if tensor.nonzero]
    every = -(-len(shown) // MOST_ROWS) if shown else 1
    rows = [HeatRow(t.name, _cells(t), t.absmax, t.zeros / t.elements) for t in shown[::every]]
    if not rows:
        return None
    used = [exponent for row in rows for exponent, _ in row.cells]
    low, high = min(*used, -26), max(*used, 17)
    return HeatMap(kind, rows, low, high, len(shown) - len(rows))


def _cells(tensor: TensorStatistics) -> list[tuple[int, float]]:
    counts: dict[int, int] = {}
    for exponent, count in tensor.exponents.items():
        at = min(max(exponent, _LEAST), _MOST)
        counts[at] = counts.get(at, 0) + count
    return [(e, counts[e] / tensor.nonzero) for e in sorted(counts)]


def what_ifs(step: StepNumerics, most: int = 12) -> list[WhatIfRow]:
    """The tensors that these formats would treat worst without a scale, worst first."""
    rows = [
        WhatIfRow(tensor.kind, tensor.name, tensor.absmax, [*_shares(tensor)])
        for tensor in step.tensors
        if tensor.kind in KINDS and tensor.nonzero
    ]
    return sorted(rows, key=lambda row: (-row.shares[0][1], -row.shares[0][0]))[:most]


def _shares(tensor: TensorStatistics) -> Iterator[tuple[float, float]]:
    for name in FORMATS:
        found = what_if(tensor, name)
        yield found.flushed, found.overflowed
