"""Which language halfstep speaks, and that every table of phrases has all of them."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import string
from pathlib import Path

import pytest

import halfstep
from halfstep.errors import ConfigError
from halfstep.words import (
    LANGUAGES,
    Said,
    Told,
    chosen_language,
    in_language,
    read_phrases,
    said,
    speaking,
    spoken,
)

SOURCE = Path(halfstep.__file__).parent
TABLES = [
    ".".join(("halfstep", *path.parent.relative_to(SOURCE).parts))
    for path in SOURCE.rglob("words.toml")
]


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8", "LC_ALL": "en_GB.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "C.UTF-8", "LANGUAGE": "zh"}, "en"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "", "LC_ALL": ""}, "en"),
    ],
)
def test_the_locale_says_the_language(environ, language):
    assert chosen_language(environ=environ) == language


def test_what_is_asked_for_goes_before_the_locale():
    assert chosen_language("en", {"LANG": "zh_CN.UTF-8"}) == "en"
    with pytest.raises(ConfigError, match="--lang fr; allowed: en, zh"):
        chosen_language("fr")


def names(text: str) -> set[str | None]:
    return {field for _, field, _, _ in string.Formatter().parse(text)} - {None}


@pytest.mark.parametrize("package", TABLES)
def test_every_phrase_stands_in_every_language_and_takes_the_same_values(package):
    for name, texts in read_phrases(package).items():
        assert tuple(texts) == LANGUAGES, name
        assert all(text.strip() for text in texts.values()), name
        assert names(texts["en"]) == names(texts["zh"]), name


TOLD = re.compile(r"\b_?told(?:\.said)?\(\s*f?\"([a-z_ ]+)")


@pytest.mark.parametrize("package", ["halfstep.cli", "halfstep.trainer", "halfstep.trainer.config"])
def test_every_phrase_is_told_somewhere_and_what_is_told_has_a_phrase(package):
    folder = SOURCE.joinpath(*package.split(".")[1:])
    # A table is told where its package is named, and in the command line's files by cli/words.py.
    own = f'Told("{package}")'
    files = [
        path for path in folder.rglob("*.py") if package.endswith("cli") or own in path.read_text()
    ]
    told = {name for path in files for name in TOLD.findall(path.read_text())}
    # Sections of configurations and names of types are put together: "section " + "run".
    told |= {"int", "float", "bool", "str"} if package.endswith("config") else set()
    together = {name for name in told if name.endswith(" ")}
    phrases = {
        next((begin for begin in together if name.startswith(begin)), name)
        for name in read_phrases(package)
    }
    assert told == phrases


CHAPTERS = [
    "halfstep.precision",
    "halfstep.trainer.bench",
    "halfstep.diagnostics.advise",
    "halfstep.diagnostics.capture",
    "halfstep.diagnostics.nonfinite",
    "halfstep.diagnostics.trace",
]


@pytest.mark.parametrize("package", CHAPTERS)
def test_every_phrase_of_a_chapter_is_named_in_its_code(package):
    """By a string, or by the beginning of one that is put together, as f"weight {mode}"."""
    named: set[str] = set()
    begun: set[str] = set()
    files = [*SOURCE.joinpath(*package.split(".")[1:]).rglob("*.py")]
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            begun.add(str(node.values[0].value))
    phrases = read_phrases(package)
    together = {name for name in phrases if any(name.startswith(b) for b in begun if b[-1:] == " ")}
    assert set(phrases) - named - together == set()
    calls = {name for path in files for name in TOLD.findall(path.read_text())}
    for name in calls:
        assert any(phrase == name or phrase.startswith(name) for phrase in phrases), name


def test_a_text_for_files_is_english_and_is_told_in_each_language():
    told = Told("halfstep.trainer.config")
    text = told.said("missing", where="--to")
    assert (text, in_language(text), json.dumps([text])) == ("--to is missing",) * 2 + (
        '["--to is missing"]',
    )
    with speaking("zh"):
        assert str(text) == f"{text}" == "--to is missing"
        assert in_language(text) == "缺少 --to"
        assert in_language(ConfigError(text)) == "缺少 --to"
        assert told("missing", where=text) == "缺少 缺少 --to"
        assert in_language("plain") == in_language(ConfigError("plain")) == "plain"
    for other in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert isinstance(other, Said)
        assert other.texts == text.texts
    assert said(spoken).texts == {"en": "en", "zh": "zh"}


def test_a_package_tells_its_phrases_in_the_language_spoken():
    told = Told("halfstep.trainer.config")
    assert told("missing", where="--to") == "--to is missing"
    with speaking("zh"):
        assert told("missing", where="--to") == "缺少 --to"
        with speaking("en"):
            assert spoken() == "en"
        assert spoken() == "zh"
    assert spoken() == "en"


def test_there_are_tables():
    assert "halfstep.report" in TABLES
