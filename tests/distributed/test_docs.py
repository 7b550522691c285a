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


def test_the_chinese_table_says_the_same():
    """Each entry of the table has one name in Chinese, and no two have the same."""
    rows = rows_of(layout_table())
    page = PAGE.with_name("distributed.zh.md").read_text(encoding="utf-8")
    shown = [row for row in rows_of(page) if len(row) == len(rows[0])]
    assert [row[0] for row in shown[1:]] == [row[0] for row in rows[1:]]  # but for the head
    pairs = {
        (english, chinese)
        for row, other in zip(rows, shown, strict=True)
        for english, chinese in zip(row[1:], other[1:], strict=True)
    }
    assert len({english for english, _ in pairs}) == len(pairs)
    assert len({chinese for _, chinese in pairs}) == len(pairs)


def rows_of(text):
    """The cells of the rows of a text's tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
