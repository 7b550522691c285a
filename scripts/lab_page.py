"""Writes docs/lab.md and docs/lab.zh.md from the scripts of lab/ and from what they found.

    make lab                      # runs the scripts with --out docs/figures/lab, then this

What stands before the first section is written by hand. A section is a script's first cell of
words, its command, its figure, the finding that is stored beside the figure, and its last cell.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, LAB, FIGURES = ROOT / "docs", ROOT / "lab", "figures/lab"
ORDER = (
    *("formats", "small_updates", "underflow", "loss_scale", "overflow", "lost_updates"),
    *("accumulation", "memory", "communication", "speed", "parity", "low_bit"),
)
SUFFIX = {"en": "", "zh": ".zh"}


def words(script: Path, language: str) -> list[str]:
    """The cells of words of a script in a language, as Markdown for a page of docs/."""
    cells = re.split(r"^# %%", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    head = f' [markdown] lang="{language}"\n'
    found = [cell.removeprefix(head).strip() for cell in cells if cell.startswith(head)]
    return [re.sub(r"^# ?", "", cell, flags=re.MULTILINE).replace("../docs/", "") for cell in found]


def page(language: str) -> str:
    """The page in a language."""
    now = (DOCS / f"lab{SUFFIX[language]}.md").read_text(encoding="utf-8")
    parts = [now.partition("## 1.")[0].strip()]
    for number, name in enumerate(ORDER, 1):
        first, last = words(LAB / f"{name}.py", language)
        title, _, question = first.removeprefix("# ").partition("\n\n")
        found = json.loads((DOCS / FIGURES / f"{name}.json").read_text(encoding="utf-8"))
        parts += [
            f"## {number}. {title}",
            question,
            f"```sh\npython lab/{name}.py\n```",
            f"![{title}]({FIGURES}/{name}{SUFFIX[language]}.svg)",
            f"**{found[language]}**",
            last,
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for language, suffix in SUFFIX.items():
        (DOCS / f"lab{suffix}.md").write_text(page(language), encoding="utf-8")
