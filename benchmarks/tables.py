"""Writes what README and docs/ say of one GPU from a file of h100.py, in English and in Chinese.

    python benchmarks/tables.py results/h100-DATE.jsonl

It fills what stands between ``<!-- gpu: NAME ... -->`` and ``<!-- /gpu -->``: NAME is a table of
``tables.toml``, whose clauses are left out where the file lacks one of their numbers.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGES = tuple(
    FOLDER.parent / f"{name}{end}.md"
    for name in ("README", "docs/measured", "docs/by-gpu") for end in ("", ".zh")
)  # fmt: skip
REGION = re.compile(r"<!-- gpu: (\w+)(?: of (\S+))? -->(.*?)<!-- /gpu -->", re.DOTALL)
TEXTS = tomllib.loads((FOLDER / "tables.toml").read_text(encoding="utf-8"))
SPLIT8 = "halfstep bf16-split,moments=8bit"
Rows = dict[tuple[str, str, str], dict[str, Any]]


def read(file: Path) -> Rows:
    """The last row of each part, size and variant that was measured."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {(r["part"], r["size"], r["variant"]): r for r in rows if r["status"] == "ok"}


class Numbers(dict[str, Any]):
    """Numbers by name, taken from the rows when a phrase asks; KeyError where one was not measured.

    A name is ``figure@part@size@variant`` or, over that of another variant, ``...@other``.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        found = next(row for row in rows.values() if "environment" in row)
        packages = found["environment"]["packages"]
        self.update(card=found["environment"]["device_name"], torch=packages["torch"])

    def __missing__(self, name: str) -> Any:
        """Find a number, or the ratio of two variants' numbers."""
        figure, part, size, variant, *other = name.replace("SPLIT8", SPLIT8).split("@")
        value = self.rows[part, size, variant][figure]
        return value / self.rows[part, size, other[0]][figure] if other else value


def text_of(name: str, language: str, file: Path) -> str:
    """What stands in a region: the clauses whose numbers are there, and its table."""
    rows, texts = read(file), TEXTS[name]
    numbers, clauses = Numbers(rows), []
    for clause in texts[language]:
        try:
            clauses.append(re.sub(r"\{([^{}:]+):?([^{}]*)\}",
                                  lambda m: format(numbers[m[1]], m[2]), clause))  # fmt: skip
        except KeyError:
            continue
    if "columns" not in texts:
        joined = texts["between"][language].join(clauses[1:])
        return f"{clauses[0]}{joined}{texts['end'][language]}" if joined else ""
    columns = texts["columns"][language]
    lines = [columns, ["---"] * len(columns)]
    lines += [cells(row) for row in rows.values() if "seconds" in row]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return "\n" + "\n".join(clauses) + f"\n\n{table}\n"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table; what was not measured of it is a dash."""
    ratio, base = row.get("of", (None, ""))
    forms = {"ms": "{:,.2f}", "tokens_per_second": "{:,.0f}", "peak_gb": "{:.2f}",
             "kernels": "{:,}", "device_ms": "{:.2f}", "host_ms": "{:.1f}"}  # fmt: skip
    found = {key: form.format(row[key]) if key in row else "-" for key, form in forms.items()}
    over = "-" if ratio is None else f"{ratio:.2f} ({base})"
    ms, tokens, *others = found.values()
    return [row["size"], row["variant"], ms, tokens, over, *others]


def filled(page: str, language: str, file: Path) -> str:
    """A page with its regions written from the file."""

    def fill(found: re.Match[str]) -> str:
        text = text_of(found[1], language, file)
        return f"<!-- gpu: {found[1]} of {file.name} -->{text}<!-- /gpu -->"

    return REGION.sub(fill, page)


def main() -> int:
    file = Path(sys.argv[1])
    for path in PAGES:
        language = "zh" if path.stem.endswith(".zh") else "en"
        path.write_text(filled(path.read_text(encoding="utf-8"), language, file), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
