r"""Makes what halfstep returns readable: in a notebook, and in the columns of a terminal.

A notebook shows the ``repr`` of other objects, where a string of several lines would stand as one,
with ``\n`` in it.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

_PRE = "font-family:monospace;white-space:pre;overflow-x:auto;font-size:12px;line-height:1.35"
"""Notebooks' own styles break lines, and some show ``pre`` in letters of unequal width."""


class Text(str):
    """Text of several lines: a string like any other, which a notebook shows as it is printed."""

    def _repr_html_(self) -> str:
        return as_html(self)


def as_html(text: str) -> str:
    """Show text as a notebook should: with its lines and columns, and nothing of it as a tag."""
    return f'<pre style="{_PRE}">{html.escape(text)}</pre>'


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align rows in columns, those with an index in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
