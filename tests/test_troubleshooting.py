"""The error table says the same in both languages: every message, in one order, with one fix."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ENGLISH, CHINESE = (
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("troubleshooting.md", "troubleshooting.zh.md")
)


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells."""
    found: list[list[list[str]]] = []
    for block in re.split(r"\n\n+", page):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert all(line.startswith("| ") or line.startswith("|-") for line in lines)
            found.append([line.strip("| ").split(" | ") for line in lines])
    return found


def spans(text: str) -> set[str]:
    return set(re.findall(r"`[^`]+`", text))


def test_every_message_has_its_cause_and_fix_in_chinese():
    pairs = list(zip(tables(ENGLISH), tables(CHINESE), strict=True))
    assert len(pairs) == 3
    for english, chinese in pairs:
        for row, other in zip(english, chinese, strict=True):
            assert len(row) == len(other), other
            # What is typed or printed stays as it is; a page's Chinese may name more of it.
            assert spans(" ".join(row)) <= spans(" ".join(other)), other
    messages = [[row[0] for row in table[2:]] for table in (pairs[1][0], pairs[1][1])]
    assert messages[0] == messages[1]
    for row in pairs[1][1][2:]:
        cause = row[1].replace("`", "")
        assert re.search(r"[\u4e00-\u9fff]", cause) or spans(row[1]), row


def test_the_figures_are_the_same():
    english, chinese = tables(ENGLISH)[2], tables(CHINESE)[2]
    assert [row[1:] for row in english[2:]] == [row[1:] for row in chinese[2:]]
