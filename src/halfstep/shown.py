r"""Makes what halfstep returns readable in a notebook, which shows the ``repr`` of other objects.

A string of several lines would stand there as one, with ``\n`` in it.
"""

from __future__ import annotations

import html


class Text(str):
    """Text of several lines: a string like any other, which a notebook shows as it is printed."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_html(self)


def as_html(text: str) -> str:
    """Text as a notebook shows it: with its lines and columns, and nothing of it as a tag."""
    return f"<pre>{html.escape(text)}</pre>"
