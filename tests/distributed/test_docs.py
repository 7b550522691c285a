"""The table of policies and layouts in the documentation is what the code decides."""

from __future__ import annotations

from pathlib import Path

from halfstep.distributed.select import layout_table

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"


def test_the_table_is_the_codes_own():
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == layout_table(), (
        "print halfstep.distributed.select.layout_table() into docs/distributed.md"
    )
