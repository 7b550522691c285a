import dataclasses
from typing import get_args

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.data.instructions import config as instructions_config
from halfstep.trainer.data.instructions.config import (
    DROP_LONG,
    FORMATS,
    TEMPLATES,
    TEMPLATES_OF,
    InstructionsConfig,
    check_template,
)


def config(**changed):
    return InstructionsConfig(**({"train": ("a.jsonl",)} | changed))


def test_defaults_are_valid_and_frozen():
    assert InstructionsConfig().train == ()  # refused where it is read
    found = config()
    assert (found.packing, found.mask_prompt, found.dev, found.format) == (True, True, (), "auto")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.packing = False


def test_the_words_of_the_types_are_those_that_are_accepted():
    assert get_args(instructions_config.Format) == FORMATS
    assert get_args(instructions_config.Template) == ("", *TEMPLATES)
    assert get_args(instructions_config.DropLong) == DROP_LONG
    assert set(TEMPLATES_OF) == set(FORMATS) - {"auto"}


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("train", "a.jsonl", "data.train must be a list of paths"),
        ("train", ("a\0",), "data.train holds the path"),
        ("dev", ("",), "data.dev holds the path"),
        ("dev", 5, "data.dev must be a list of paths"),
        ("dev_fraction", 0.0, "between 0 and 1"),
        ("dev_fraction", 1.0, "between 0 and 1"),
        ("dev_fraction", float("nan"), "between 0 and 1"),
        ("dev_fraction", True, "between 0 and 1"),
        ("dev_fraction", "0.1", "between 0 and 1"),
        ("format", "sharegpt", "one of auto, alpaca, chat, text, prompt-completion; got 'sharegpt"),
        ("format", ["chat"], "data.format must be one of"),
        ("template", "chatml", "one of plain, alpaca, vicuna, tokenizer; got 'chatml'"),
        ("drop_long", True, "one of truncate, drop, refuse; got True"),
        ("max_length", 1, "whole number of at least 2"),
        ("max_length", 8.0, "whole number of at least 2"),
        ("max_length", True, "whole number of at least 2"),
        ("packing", 1, "data.packing must be true or false, got 1"),
        ("mask_prompt", "yes", "data.mask_prompt must be true or false"),
    ],
)
def test_a_bad_value_names_its_field(field, value, why):
    with pytest.raises(ConfigError, match=why) as caught:
        config(**{field: value})
    assert f"data.{field}" in str(caught.value)


@pytest.mark.parametrize(
    ("format", "template"), [("chat", "alpaca"), ("chat", "plain"), ("text", "vicuna")]
)
def test_a_template_must_be_able_to_write_the_format(format, template):
    why = f"data.template {template} cannot write records of the format {format}; use "
    with pytest.raises(ConfigError, match=why):
        config(format=format, template=template)
    config(format="auto", template=template)  # known only when the records are
    for possible in ("", *TEMPLATES_OF[format]):
        check_template(format, possible)
        config(format=format, template=possible)
