"""What holds for every experiment: its words in both languages, its settings, its figure."""

from __future__ import annotations

from dataclasses import fields

import pytest

from halfstep.errors import ConfigError
from halfstep.lab.course import EXPERIMENTS
from halfstep.lab.experiment import PHRASES, read_settings
from halfstep.words import LANGUAGES

NEEDED = ("title", "question", "look")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_its_words_and_at_most_three_things_to_change(name):
    options = [field.name for field in fields(EXPERIMENTS[name].options)]
    assert 1 <= len(options) <= 3
    for phrase in (*NEEDED, *options):
        assert f"{name}.{phrase}" in PHRASES
    for language in LANGUAGES:
        assert [row[0] for row in EXPERIMENTS[name].changeable(language)] == options


def test_no_phrase_belongs_to_an_experiment_that_there_is_not():
    owners = {phrase.partition(".")[0] for phrase in PHRASES if "." in phrase}
    assert owners == set(EXPERIMENTS)


def test_a_wrong_setting_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"stepz.*did you mean 'steps'"):
        EXPERIMENTS["small-updates"].options_of({"stepz": "3"})
    with pytest.raises(ConfigError, match=r"steps.*allowed: integers >= 1"):
        EXPERIMENTS["small-updates"].options_of({"steps": "0"})
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        read_settings(("steps",))
    with pytest.raises(ConfigError, match="given twice"):
        read_settings(("steps=1", "steps=2"))
