"""Draws the exponents of a watched step's tensors as maps: a row a tensor, a column a binade.

The maps are SVG for a page or a notebook. Text takes the colour of its surroundings, and cells take
that of the page's variables, where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from halfstep.diagnostics.statistics.values import Kind, TensorStatistics
from halfstep.formats import FP16
from halfstep.shown import end_of

SHOWN: Sequence[Kind] = ("activation", "activation_gradient", "gradient", "update")
MOST_ROWS = 48
"""Tensors of a map; of a deeper model every n-th is shown, so that it stays one screen."""
_LEAST, _MOST = -60, 40
_SEEN = 1e-3
"""A map begins and ends where some tensor has a thousandth of its numbers, and within these two
exponents; what lies beyond is drawn at the edge."""
FLUSHED_BELOW = math.log2(FP16.min_subnormal) - 1  # halves of it are rounded to even, which is 0
FEWER_DIGITS_BELOW = math.log2(FP16.min_normal)
OVERFLOW_FROM = 16.0  # 65,520 and above round to infinity

WORDS: Mapping[str, str] = {
    "activation": "activations",
    "activation_gradient": "gradients of activations",
    "gradient": "gradients of weights",
    "update": "updates of weights",
    "limit_zero": "0 in fp16",
    "limit_subnormal": "subnormal in fp16",
    "limit_overflow": "fp16 overflows",
    "limit_scaled": "with the loss scale",
}
"""What a map says, in English; a page in another language gives its own."""
_LABELS, _CELLS, _ROW, _HEAD = 190, 690, 14, 16  # of a map 880 units wide


@dataclass(frozen=True, slots=True)
class MapRow:
    """One tensor: what share of its numbers that are not 0 has which exponent."""

    name: str
    cells: Sequence[tuple[int, float]]
    largest: float


@dataclass(frozen=True, slots=True)
class ExponentMap:
    """The tensors of one kind, by exponent from ``low`` to ``high``."""

    kind: Kind
    rows: Sequence[MapRow]
    low: int
    high: int
    left_out: int
    """Tensors that are not shown."""
    scale: int = 0
    """The exponent of the loss scale that these numbers were multiplied by in the step."""

    def svg(self, words: Mapping[str, str] = WORDS) -> str:
        """The map as one SVG element."""
        columns, height = self.high - self.low + 1, _ROW * len(self.rows)
        wide = _CELLS / columns
        title = escape(words[self.kind], quote=True)
        drawn = [
            f'<svg class="heat" viewBox="0 0 {_LABELS + _CELLS} {height + 2 * _HEAD + 4}" '
            f'role="img" aria-label="{title}" fill="currentColor" '
            'font-family="sans-serif" font-size="10">'
        ]
        for at, row in enumerate(self.rows):
            y = _HEAD + _ROW * at + 10
            name = f"{escape(row.name)}: {row.largest:.3g}"
            drawn.append(
                f"<g><title>{name}</title>"
                f'<text x="{_LABELS - 6}" y="{y}" text-anchor="end">{escape(end_of(row.name, 32))}'
                "</text></g>"
            )
        drawn.append(
            f'<g transform="translate({_LABELS} {_HEAD}) scale({wide:.3f} {_ROW})" '
            'style="fill:var(--c0,#0072b2)">'
        )
        drawn += [
            f'<rect x="{e - self.low}" y="{at}" width="1" height="1" '
            f'fill-opacity="{math.sqrt(share):.2f}"/>'
            for at, row in enumerate(self.rows)
            for e, share in row.cells
        ]
        drawn.append("</g>")
        drawn += self._limits(words, wide, height)
        for e in range(self.low, self.high + 1):
            if e % 8 == 0:
                x = _LABELS + wide * (e - self.low)
                drawn.append(
                    f'<text x="{x:.1f}" y="{height + _HEAD + 14}" text-anchor="middle">2'
                    f'<tspan dy="-4" font-size="8">{e}</tspan></text>'
                )
        return "".join([*drawn, "</svg>"])

    def _limits(self, words: Mapping[str, str], wide: float, height: int) -> list[str]:
        """Where fp16 rounds to zero, has fewer digits, and overflows: lines with their names."""
        lines = [
            (FLUSHED_BELOW, words["limit_zero"], "end", -4, ""),
            (FEWER_DIGITS_BELOW, words["limit_subnormal"], "end", -4, ""),
            (OVERFLOW_FROM, words["limit_overflow"], "end", 0, ""),
        ]
        if self.scale:
            shifted = f"{words['limit_scaled']} 2^{self.scale}"
            lines.append((FLUSHED_BELOW - self.scale, shifted, "start", 4, "4 3"))
        drawn = []
        for limit, name, anchor, off, dash in lines:
            if not self.low <= limit <= self.high + 1:
                continue
            x = _LABELS + wide * (limit - self.low)
            drawn.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 2}" y2="{height + _HEAD}" '
                f'style="stroke:var(--fault,#b3261e)" stroke-dasharray="{dash or "none"}"/>'
                f'<text x="{x + off:.1f}" y="{_HEAD - 5}" text-anchor="{anchor}" font-size="9" '
                f'style="fill:var(--fault,#b3261e)">{escape(name)}</text>'
            )
        return drawn


def exponent_maps(
    tensors: Sequence[TensorStatistics], loss_scale: float = 1.0
) -> list[ExponentMap]:
    """The maps of a watched step, one for each kind of tensor that it has, on one scale."""
    scaled = 0 < loss_scale < math.inf
    scale = round(math.log2(loss_scale)) if scaled else 0
    chosen = {}
    for kind in SHOWN:
        with_numbers = [one for one in tensors if one.kind == kind and one.nonzero]
        if with_numbers:
            every = -(-len(with_numbers) // MOST_ROWS)
            chosen[kind] = with_numbers, with_numbers[::every]
    seen = [
        e
        for _, shown in chosen.values()
        for tensor in shown
        for e, count in tensor.exponents.items()
        if count >= _SEEN * tensor.nonzero
    ]
    low, high = max(_LEAST, min([*seen, -26])), min(_MOST, max([*seen, 16]))
    return [
        ExponentMap(
            kind,
            [MapRow(t.name, _cells(t, low, high), t.absmax) for t in shown],
            low,
            high,
            len(every_one) - len(shown),
            scale if kind in ("activation_gradient", "gradient") else 0,
        )
        for kind, (every_one, shown) in chosen.items()
    ]


def maps_html(tensors: Sequence[TensorStatistics], loss_scale: float = 1.0) -> str:
    """The maps of a step under their titles, for a notebook."""
    return "".join(
        f'<p style="margin:.6em 0 0"><b>{escape(WORDS[each.kind])}</b></p>'
        f'<div style="max-width:60em">{each.svg()}</div>'
        for each in exponent_maps(tensors, loss_scale)
    )


def _cells(tensor: TensorStatistics, low: int, high: int) -> list[tuple[int, float]]:
    counts: dict[int, int] = {}
    for exponent, count in tensor.exponents.items():
        at = min(max(exponent, low), high)
        counts[at] = counts.get(at, 0) + count
    return [(e, counts[e] / tensor.nonzero) for e in sorted(counts)]
