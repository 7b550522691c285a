import dataclasses

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.data.config import (
    TEMPLATES_OF,
    DataConfig,
    InstructionsConfig,
    LabelledConfig,
    bpe_size,
    check_template,
)


def test_defaults_are_the_documented_ones():
    pretraining, texts, records = DataConfig(), LabelledConfig(), InstructionsConfig()
    assert (pretraining.train, pretraining.validation, pretraining.cache_dir) == ((), (), "")
    assert (pretraining.tokenizer, pretraining.validation_fraction) == ("bpe:8192", 0.1)
    assert (texts.train, texts.dev, texts.dev_fraction, texts.labels) == ((), (), 0.1, ())
    assert (records.packing, records.mask_prompt, records.dev) == (True, True, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        records.packing = False


SHARES = [0.0, 1.0, -0.1, 1.5, float("nan"), float("inf")]


@pytest.mark.parametrize(
    ("config", "field", "value", "why"),
    [
        *(
            (DataConfig, "validation_fraction", x, "must be a number between 0 and 1")
            for x in SHARES
        ),
        *((LabelledConfig, "dev_fraction", x, "must be a number between 0 and 1") for x in SHARES),
        *((InstructionsConfig, "dev_fraction", x, "must be a number between 0") for x in SHARES),
        *((DataConfig, "train", (x,), "holds the path") for x in ("", "  ", "a\0b")),
        (DataConfig, "validation", ("",), "holds the path"),
        (LabelledConfig, "train", (" ",), "holds the path ' '"),
        (LabelledConfig, "dev", ("a\0b",), "holds the path"),
        (InstructionsConfig, "train", ("a\0",), "holds the path"),
        (InstructionsConfig, "dev", ("",), "holds the path"),
        (DataConfig, "tokenizer", "", "is empty"),
        *(
            (DataConfig, "tokenizer", x, "must be bytes, bpe:N with N of at least 257")
            for x in ("bpe:", "bpe:abc", "bpe:256", "bpe:-5", "bpe:1e4", "bpe:0")
        ),
        (LabelledConfig, "labels", ("a", " "), "holds an empty name ' '"),
        (LabelledConfig, "labels", ("a", "b", "a"), "holds 'a' twice"),
        (InstructionsConfig, "max_length", 1, "must be a whole number of at least 2"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(config, field, value, why):
    with pytest.raises(ConfigError) as error:
        config(**{field: value})
    assert f"data.{field} {why}" in str(error.value)


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="both 'a'"):
        LabelledConfig(text_column="a", label_column="a")


def test_numbers_are_read_out_of_words():
    sizes = {"bpe:257": 257, "bpe:8192": 8192, "bytes": None, "/a/bpe:300": None}
    assert {word: bpe_size(DataConfig(tokenizer=word).tokenizer) for word in sizes} == sizes


@pytest.mark.parametrize(
    ("format", "template"), [("chat", "alpaca"), ("chat", "plain"), ("text", "alpaca")]
)
def test_a_template_must_be_able_to_write_the_format(format, template):
    why = f"data.template {template} cannot write records of the format {format}; use "
    with pytest.raises(ConfigError, match=why):
        check_template(format, template)
    for possible in ("", *TEMPLATES_OF[format]):
        check_template(format, possible)


@pytest.mark.parametrize(
    ("task", "field", "value"),
    [
        ("classify", "train", 5),
        ("classify", "dev", ["a\0b"]),
        ("classify", "dev_fraction", True),
        ("classify", "text_column", 1),
        ("lm", "template", ["plain"]),
        ("lm", "max_length", 8.5),
        ("lm", "packing", 1),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_read(task, field, value):
    with pytest.raises(ConfigError, match=f"key data.{field}: "):
        config_from_table({"task": task, "data": {field: value}})
