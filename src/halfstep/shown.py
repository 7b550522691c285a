r"""Makes what halfstep returns readable: in a notebook, and in the columns of a terminal.

A notebook shows the ``repr`` of other objects, where a string of several lines would stand as one,
with ``\n`` in it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Self
from unicodedata import east_asian_width


class Text(str):
    """Text of several lines: a string like any other, which a notebook shows as it is printed."""

    figure: str = ""
    """HTML that a notebook shows below it."""

    @classmethod
    def with_figure(cls, text: str, figure: str) -> Self:
        """Text with a figure, such as :func:`bars` makes."""
        made = cls(text)
        made.figure = figure
        return made

    def _repr_html_(self) -> str:
        return as_html(self, self.figure)


def as_html(text: str, figure: str = "") -> str:
    """Text as a notebook shows it: with its lines and columns, and nothing of it as a tag.

    Args:
        text: What ``print`` shows.
        figure: HTML that stands below it, such as :func:`bars` makes.
    """
    return f'<pre style="{_PRE}">{html.escape(text)}</pre>{figure}'


_PRE = "font-family:monospace;white-space:pre;overflow-x:auto;font-size:12px;line-height:1.35"
"""Notebooks' own styles break lines, and some show ``pre`` in letters of unequal width."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b57c00", "#56b4e9")
_FIXED = {
    **{"fp32": "#0072b2", "float32": "#0072b2", "bf16": "#d55e00", "bfloat16": "#d55e00"},
    **{"fp16": "#009e73", "float16": "#009e73", "bytes": "#0072b2"},
    **{"lost": "#d55e00", "kept": "#9aa0a6"},
}


def bars(rows: Mapping[str, Mapping[str, float]], title: str, whole: float | None = None) -> str:
    """Horizontal bars of stacked parts as SVG; text takes the colour of the surroundings.

    Args:
        rows: A bar's name to its parts, by name, such as the dtypes of what it holds.
        title: What the lengths are, with their unit.
        whole: The value as long as the figure; None: the longest bar's.

    Returns:
        One SVG element, or nothing where there is no bar.
    """
    rows = {name: {k: v for k, v in parts.items() if v > 0} for name, parts in rows.items()}
    longest = whole or max((sum(parts.values()) for parts in rows.values()), default=0.0)
    rows = {name: parts for name, parts in rows.items() if parts}
    if not rows:
        return ""
    named = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    colours = _colours(named)
    drawn = [
        f'<svg viewBox="0 0 720 {44 + 20 * len(rows)}" role="img" '
        f'aria-label="{html.escape(title)}" fill="currentColor" font-family="sans-serif" '
        f'font-size="11" style="max-width:720px;display:block">'
        f'<text x="0" y="13" font-weight="bold">{html.escape(title)}</text>'
    ]
    at = 180.0
    for name in named:
        drawn.append(
            f'<rect x="{at:.0f}" y="22" width="10" height="10" fill="{colours[name]}"/>'
            f'<text x="{at + 14:.0f}" y="31">{html.escape(name)}</text>'
        )
        at += 30 + 7 * len(name)
    for i, (name, parts) in enumerate(rows.items()):
        y, x = 40 + 20 * i, 180.0
        drawn.append(
            f'<text x="172" y="{y + 12}" text-anchor="end">{html.escape(end_of(name))}</text>'
        )
        for part, value in parts.items():
            width = 440 * value / longest
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" '
                f'fill="{colours[part]}"><title>{html.escape(part)}: {value:.3g}</title></rect>'
            )
            x += width
        drawn.append(f'<text x="{x + 5:.1f}" y="{y + 12}">{sum(parts.values()):,.3g}</text>')
    return "".join([*drawn, "</svg>"])


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; the formats have the same one in every figure."""
    free = cycle([*_COLOURS[3:], *_COLOURS[:3]])
    return {name: _FIXED.get(name) or next(free) for name in names}


def end_of(name: str, most: int = 28) -> str:
    """The end of a long name, which tells modules apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def columns(text: str) -> int:
    """Columns of a terminal that text takes; a wide character, as Chinese ones are, takes two."""
    return sum(1 + is_wide(character) for character in text)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Text with blanks behind it, up to so many columns of a terminal; ``right``: before it."""
    blanks = " " * (width - columns(text))
    return blanks + text if right else text + blanks


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of columns, of which the last one is flush right."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*map(padded, row[:-1], widths[:-1]), padded(row[-1], widths[-1], right=True)])
        for row in rows
    )


def is_wide(character: str) -> bool:
    """Whether a character takes two columns of a terminal.

    **Source:** Unicode Standard Annex 11, "East Asian Width": W and F are wide.
    """
    return east_asian_width(character) in "WF"
