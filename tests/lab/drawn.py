"""Draws what an experiment measured in both languages, and finds every text in the file."""

from __future__ import annotations

import json
from html import unescape

from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiment import Made, Say, make
from halfstep.lab.figure import draw
from halfstep.words import LANGUAGES


def made(name: str, **settings: object) -> Made:
    """The experiment, as it comes back from its JSON."""
    found = make(EXPERIMENTS[name], {key: str(value) for key, value in settings.items()})
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))["data"]
    return Made(found.experiment, found.options, data)


def assert_drawn(found: Made, folder, monkeypatch) -> None:
    """Every phrase that the drawing asks for stands in the figure, in the language asked for."""
    asked: list[str] = []
    said = Say.__call__

    def listening(self, name, **values):
        asked.append(said(self, name, **values))
        return asked[-1]

    for language in LANGUAGES:
        asked.clear()
        path = folder / f"{language}.svg"
        with monkeypatch.context() as patch:
            patch.setattr(Say, "__call__", listening)
            assert draw(found, path, language)
        svg = unescape(path.read_text(encoding="utf-8"))
        assert len(asked) >= 3
        for line in (line for text in asked for line in text.splitlines()):
            assert f">{line}<" in svg, line
        sentence = found.verdict(language)
        assert sentence.rstrip().endswith((".", "。"))
        assert ("的" in sentence) == (language == "zh")
