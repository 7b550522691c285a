"""Text in the columns of a terminal, and as what is to be typed there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from unicodedata import east_asian_width


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align rows in columns, those with an index in ``right`` flush right."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            (cell.rjust if i in right else cell.ljust)(width - _width(cell) + len(cell))
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _width(cell: str) -> int:
    """Count the places of a text: 字 takes two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in cell)


def typed_trainer(resume: bool, changes: Mapping[str, object]) -> str:
    """Write the call of :class:`halfstep.Trainer` that goes on, or trains anew, with changes."""
    words = [f"{k}={v if k == 'learning_rate' else repr(v)}, " for k, v in changes.items()]
    return f"Trainer({''.join(words)}...).train({'resume=True' * resume})"
