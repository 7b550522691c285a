"""Which language halfstep speaks, and that every table of phrases has all of them."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

import halfstep
from halfstep.errors import ConfigError
from halfstep.words import LANGUAGES, Told, chosen_language, read_phrases, speaking, spoken

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


TOLD = re.compile(r"\b_?told\(\s*f?\"([a-z_ ]+)")


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
    phrases = {
        "section " if name.startswith("section ") else name for name in read_phrases(package)
    }
    assert told == phrases


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
