"""What every figure of the course must stand: drawn in both languages, with all of its words."""

from __future__ import annotations

import html
from pathlib import Path

from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiment import Made, make
from halfstep.lab.figure import draw, drawn
from halfstep.words import LANGUAGES


def made(name: str, **options: object) -> Made:
    """An experiment with some options."""
    return make(EXPERIMENTS[name], {key: str(value) for key, value in options.items()})


def require_figures(one: Made, folder: Path) -> None:
    """Draw in each language, and find every word of the figure in its file; say the verdict."""
    for language in LANGUAGES:
        words = words_of(drawn(one, language))
        path = folder / f"{language}.svg"
        assert draw(one, path, language)
        svg = html.unescape(path.read_text(encoding="utf-8"))
        for word in words:
            assert word.replace("\\$", "$") in svg, word
        said = one.verdict(language)
        assert "nan" not in said
        for text in [said, *words]:
            assert "{" not in text
        chinese = [text for text in words if any("\u4e00" <= c <= "\u9fff" for c in text)]
        assert bool(chinese) == (language == "zh"), chinese
        assert any("\u4e00" <= c <= "\u9fff" for c in said) == (language == "zh")


def words_of(figure) -> list[str]:
    """The lines of text of a figure, without the numbers of its axes."""
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in axes.texts]
    return [line for text in found for line in text.split("\n") if line.strip()]
