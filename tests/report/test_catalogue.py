"""The catalogue of the report page has every sentence in Chinese, and is compiled."""

from __future__ import annotations

import string
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import catalogue


def names(text: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}


def test_every_sentence_of_the_sources_is_translated_and_none_is_left_over():
    translated = catalogue.translated()
    assert set(translated) == {message.id for message in catalogue.gathered() if message.id}
    for english, chinese in translated.items():
        assert chinese.strip(), english
        assert names(chinese) <= names(english), english


def test_what_the_program_reads_is_what_stands_in_the_catalogue():
    assert catalogue.compiled() == catalogue.translated(), "make catalogue"
