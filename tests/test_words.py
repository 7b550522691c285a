"""Which language halfstep speaks, and that every table of phrases has all of them."""

from __future__ import annotations

import copy
import json
import pickle
import re
import string
from pathlib import Path

import pytest

import halfstep
from halfstep.errors import ConfigError, NonFiniteError, SpikeError
from halfstep.words import (
    LANGUAGES,
    Told,
    chosen_language,
    joined,
    message,
    phrase_of,
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


TOLD = re.compile(r"\b(?:_?told(?:\.phrase)?|_phrase)\(\s*(f?)[\"']([^\"'{]+)")
OF_OTHERS = {"halfstep.report"}
"""Packages whose phrases are asked for in other ways, and whose own tests see to it."""


@pytest.mark.parametrize("package", sorted({*TABLES} - OF_OTHERS))
def test_every_phrase_is_told_somewhere_and_what_is_told_has_a_phrase(package):
    folder = SOURCE.joinpath(*package.split(".")[1:])
    # A table is told where its package is named, and in the command line's files by cli/words.py.
    own = f'Told("{package}")'
    files = [
        path for path in folder.rglob("*.py") if package.endswith("cli") or own in path.read_text()
    ]
    found = {match for path in files for match in TOLD.findall(path.read_text())}
    told = {name for put_together, name in found if not put_together}
    # names of types are those of Python
    told |= {"int", "float", "bool", "str"} if package.endswith("config") else set()
    # Others are put together, as sections of configurations: "section " + "run".
    beginnings = {name for put_together, name in found if put_together}
    phrases = set(read_phrases(package))
    for beginning in beginnings:
        others = {name for name in phrases if name.startswith(beginning)} - told
        assert others, beginning
        phrases -= others
    assert told == phrases


# Names and code of several words, which are the same in every language.
NAMES = re.compile(
    r"halfstep [a-z]+( [A-Z]+)*( \.\.\. --[a-z]+ [A-Z]+)?|[a-z_]+\.?[a-z_.]+\([^)]*\)|--[a-z.-]+"
    r"|torch\.[\w.]+|`[^`]*`|\{[^}]*\}"
)
SENTENCE = re.compile(r"(?:[A-Za-z][a-z']*[ ,]+){2,}[A-Za-z][a-z']*")


@pytest.mark.parametrize("package", TABLES)
def test_no_chinese_phrase_is_english(package):
    """Three words of English in a row are a sentence, but for names and code."""
    for name, texts in read_phrases(package).items():
        found = SENTENCE.search(NAMES.sub("，", texts["zh"]))
        assert not found, f"{name}: {found and found[0]}"


def test_a_package_tells_its_phrases_in_the_language_spoken():
    told = Told("halfstep.trainer.config")
    assert told("missing", where="--to") == "--to is missing"
    with speaking("zh"):
        assert told("missing", where="--to") == "缺少 --to"
        with speaking("en"):
            assert spoken() == "en"
        assert spoken() == "zh"
    assert spoken() == "en"


def test_a_phrase_is_english_until_it_is_said():
    told = Told("halfstep.diagnostics.memory")
    reasons = joined([told.phrase("why casts", share="4%"), "x"], told.phrase("and"))
    why = told.phrase("why", total="44 MB", reasons=reasons)
    english = "Of 44 MB, 4% are 16-bit copies of weights that come on top; x."
    assert why == english
    with speaking("zh"):
        # values, errors and JSON hold it as it is
        assert (str(why), f"{why}", json.dumps([why])) == (english, english, f'["{english}"]')
        assert said(why) == "44 MB 之中，4% 是额外的 16 位权重副本；x。"
        inner = told.phrase("why casts", share="4%")
        assert told("why", total="1 B", reasons=inner) == "1 B 之中，4% 是额外的 16 位权重副本。"
        for kept in (copy.deepcopy(why), pickle.loads(pickle.dumps(why))):
            assert said(kept) == said(why)
        assert said(why, "en") == english
        assert said("as it is") == "as it is"
    assert said(why) == english


def test_what_a_function_says_and_an_errors_message_are_told_in_each_language():
    told = Told("halfstep.trainer.config")
    text = phrase_of(lambda: told("missing", where=spoken()))
    assert (text, f"{text}", json.dumps([text])) == ("en is missing",) * 2 + ('["en is missing"]',)
    assert said(text, "zh") == "缺少 zh"
    with speaking("zh"):
        assert str(ConfigError(text)) == "en is missing"
        assert said(message(ConfigError(text))) == "缺少 zh"
        assert message(ConfigError("plain")) == "plain"
        for kept in (
            copy.deepcopy(text),
            pickle.loads(pickle.dumps(text)),
            pickle.loads(pickle.dumps(told.phrase("missing", where=1))),
            message(pickle.loads(pickle.dumps(NonFiniteError(text, cause="forward")))),
            message(pickle.loads(pickle.dumps(SpikeError(text, cause="loss_spike")))),
        ):
            assert said(kept).startswith("缺少")
        both = joined([text, "x"], told.phrase("missing", where="+"))
        assert said(both) == "缺少 zh缺少 +x"
        assert message(OSError(2, "No such file")) == "[Errno 2] No such file"


def test_there_are_tables():
    assert "halfstep.report" in TABLES
