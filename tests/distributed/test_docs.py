"""The table of policies and layouts in the documentation is what the code decides."""

from __future__ import annotations

from pathlib import Path

from distributed.test_select import TABLE_LAYOUTS
from halfstep.distributed.layout import Layout
from halfstep.distributed.select import decide
from halfstep.precision.policy.policy import POLICIES

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"


def test_the_table_is_the_codes_own():
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == layout_table(), "print layout_table() into docs/distributed.md"


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


def layout_table() -> str:
    """Format every named policy under every kind of layout as Markdown, with refusals' reasons."""
    lines = ["| policy | " + " | ".join(f"`{text}`" for text in TABLE_LAYOUTS) + " |"]
    lines.append("|---" * (len(TABLE_LAYOUTS) + 1) + "|")
    reasons: dict[str, None] = {}
    for name, policy in POLICIES.items():
        cells = []
        for text in TABLE_LAYOUTS:
            verdict = decide(policy, Layout.parse(text))
            cells.append("refused" if verdict.refused else verdict.note or "yes")
            if verdict.refused:
                reasons[f"`{name}`: {verdict.refused}; use {verdict.nearest}."] = None
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *reasons])
