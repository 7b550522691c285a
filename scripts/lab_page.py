"""Writes docs/lab.md and docs/lab.zh.md from the course's words and from what was measured.

    halfstep lab all --out docs/figures/lab    # measures, and draws the figures
    python scripts/lab_page.py                 # draws them again from the numbers, writes the pages

Nothing on these pages is written by hand but the words below: a verdict follows from the numbers in
docs/figures/lab/NAME.json, which name the machine that they come from.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiment import Made, Say
from halfstep.lab.figure import draw
from halfstep.words import LANGUAGES

DOCS = Path(__file__).resolve().parents[1] / "docs"
FIGURES = "figures/lab"
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""What the pages say around the experiments: a name, then the phrase in every language."""
DEPENDS = ("memory", "speed", "parity")
"""Experiments whose numbers depend on the machine; memory by the kernels that it has."""
READ = {
    "formats": ("number-line", "concepts#formats-range-and-precision"),
    "small-updates": ("number-line", "concepts#what-goes-wrong-in-16-bits"),
    "underflow": ("loss-scale", "concepts#loss-scaling"),
    "loss-scale": ("loss-scaling", "loss-scale"),
    "overflow": ("concepts#operations-that-stay-in-fp32", "diagnostics"),
    "lost-updates": ("concepts#master-weights", "policies"),
    "accumulation": ("concepts#sums-in-fp32",),
    "memory": ("memory", "concepts#memory-does-not-halve"),
    "communication": ("distributed", "concepts#communication"),
    "speed": ("bench", "concepts#speed-and-when-it-does-not-pay"),
    "parity": ("measured", "concepts#quality"),
    "low-bit": ("low-bit", "glossary"),
}
"""Pages to read on; the anchors are those of the English page."""


def page(language: str) -> str:
    """The page in a language."""
    say = {name: phrase[language] for name, phrase in WORDS.items()}
    parts = [f"# {say['title']}", say["switch"], say["about"], say["how"], "```sh\n" + HOW + "```"]
    for number, name in enumerate(EXPERIMENTS, 1):
        parts += _section(number, name, language, say)
    return "\n\n".join(parts) + "\n"


HOW = """halfstep lab
halfstep lab underflow
halfstep lab underflow small=4
halfstep lab underflow --notebook
halfstep lab all --out figures
"""


def _section(number: int, name: str, language: str, say: Mapping[str, str]) -> list[str]:
    found = json.loads((DOCS / FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    made, told = made_of(found), Say(name, language)
    suffix = "" if language == "en" else f".{language}"
    rows = [
        f"| `{option}={default or '...'}` | {shows} |"
        for option, default, shows in made.experiment.changeable(language)
    ]
    parts = [
        f"## {number}. {told('title')}",
        told("question"),
        f"```sh\nhalfstep lab {name}\n```",
        f"![{told('title')}]({FIGURES}/{name}{suffix}.svg)",
        f"**{made.verdict(language)}**",
        told("look"),
    ]
    if name in DEPENDS:
        parts.append(_machine(found["machine"], say))
    parts.append("\n".join([f"| {say['change']} | {say['shows']} |", "|---|---|", *rows]))
    links = [_link(target, language, say) for target in READ[name]]
    return [*parts, say["read"].format(pages=say["join"].join(links))]


def _machine(machine: Mapping[str, Any], say: Mapping[str, str]) -> str:
    kind = say["with_bf16" if machine["bf16_instructions"] else "without_bf16"]
    return say["machine"].format(kind=kind, **machine)


def _link(target: str, language: str, say: Mapping[str, str]) -> str:
    name, hash_, anchor = target.partition("#")
    page = f"{name}.md" if language == "en" else f"{name}.{language}.md"
    return f"[{say[f'page_{name}']}]({page}{hash_}{anchor_of(name, anchor, language)})"


def anchor_of(name: str, anchor: str, language: str) -> str:
    """The anchor of a heading: on a Chinese page the one of the same place among its headings."""
    if language == "en" or not anchor:
        return anchor
    slugs = {each: _slugs(DOCS / f"{name}{end}") for each, end in (("en", ".md"), ("zh", ".zh.md"))}
    return slugs[language][slugs["en"].index(anchor)]


def _slugs(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    kept = ("".join(c for c in title.lower() if c.isalnum() or c in " -_") for title in titles)
    return [title.replace(" ", "-") for title in kept]


def made_of(found: dict[str, Any]) -> Made:
    """An experiment as it comes back from its JSON."""
    experiment = EXPERIMENTS[found["experiment"]]
    return Made(experiment, experiment.options(**found["options"]), found["data"])


def main() -> None:
    """Draw every figure from its numbers, and write both pages."""
    for name in EXPERIMENTS:
        found = json.loads((DOCS / FIGURES / f"{name}.json").read_text(encoding="utf-8"))
        for language in LANGUAGES:
            suffix = "" if language == "en" else f".{language}"
            draw(made_of(found), DOCS / FIGURES / f"{name}{suffix}.svg", language)
    for language, name in (("en", "lab.md"), ("zh", "lab.zh.md")):
        (DOCS / name).write_text(page(language), encoding="utf-8")


if __name__ == "__main__":
    main()
