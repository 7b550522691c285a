import dataclasses

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.data.config import DataConfig, bpe_size
from halfstep.trainer.data.instructions.config import (
    TEMPLATES_OF,
    InstructionsConfig,
    check_template,
)
from halfstep.trainer.data.labelled.config import LabelledConfig, column_number


def test_defaults_are_the_documented_ones():
    config = DataConfig()
    assert config.train == ()
    assert config.validation == ()
    assert config.tokenizer == "bpe:8192"
    assert config.validation_fraction == 0.1
    assert config.cache_dir == ""


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan"), float("inf"), True, "0.1"])
def test_a_fraction_that_leaves_one_side_empty_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"data\.validation_fraction must be a number between"):
        DataConfig(validation_fraction=fraction)


@pytest.mark.parametrize("tokenizer", ["bpe:", "bpe:abc", "bpe:256", "bpe:-5", "bpe:1e4", "bpe:0"])
def test_a_malformed_bpe_size_is_refused_with_the_smallest_one(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be bytes, bpe:N .* 257"):
        DataConfig(tokenizer=tokenizer)


@pytest.mark.parametrize("field", ["train", "validation"])
@pytest.mark.parametrize("value", ["text.txt", ["text.txt"], ("",), ("  ",), (3,), ("a\0b",)])
def test_paths_must_be_a_tuple_of_strings_that_name_something(field, value):
    with pytest.raises(ConfigError, match=rf"data\.{field}"):
        DataConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("tokenizer", ""), ("tokenizer", 5), ("cache_dir", 5)]
)
def test_strings_must_be_strings(field, value):
    with pytest.raises(ConfigError, match=rf"data\.{field}"):
        DataConfig(**{field: value})


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [("bpe:257", 257), ("bpe:8192", 8192), ("bytes", None), ("/a/bpe:300", None)],
)
def test_bpe_size_reads_n(tokenizer, size):
    DataConfig(tokenizer=tokenizer)
    assert bpe_size(tokenizer) == size


def test_the_defaults_need_only_training_data():
    config = LabelledConfig(train=("a.csv",))
    assert (config.dev, config.dev_fraction, config.labels) == ((), 0.1, ())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": "a.csv"}, "data.train must be a list of paths, got 'a.csv'"),
        ({"train": (" ",)}, "data.train holds the path ' '"),
        ({"dev": ("a\0b",)}, "data.dev holds the path"),
        ({"dev_fraction": 1.0}, "dev_fraction must be a number between 0 and 1"),
        ({"dev_fraction": 0.0}, "dev_fraction must"),
        ({"dev_fraction": True}, "dev_fraction must"),
        ({"dev_fraction": float("nan")}, "dev_fraction must"),
        ({"text_column": 1}, "data.text_column must be a string"),
        ({"labels_file": "a\0"}, "data.labels_file must be a string"),
        ({"text_column": "0"}, "data.text_column is 0; columns are counted from 1"),
        ({"label_column": "00"}, "data.label_column is 0"),
        ({"text_column": "a", "label_column": "a"}, "both 'a'"),
        ({"text_column": "a", "label_column": "2"}, "give two names, or two numbers"),
        ({"labels": ["a", "b"]}, "data.labels must be a list of names"),
        ({"labels": ("a", 1)}, "data.labels must be a list of names"),
        ({"labels": ("a", " ")}, "data.labels holds an empty name ' '"),
        ({"labels": ("a", "b", "a")}, "data.labels holds 'a' twice"),
        ({"labels": ("a", "b"), "labels_file": "x"}, "are both given"),
        ({"drop_empty": 1}, "data.drop_empty must be true or false"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, says):
    given = fields if "train" in fields or not fields else {"train": ("a.csv",), **fields}
    with pytest.raises(ConfigError) as error:
        LabelledConfig(**given)
    assert says in str(error.value)


def test_a_number_is_a_column_counted_from_1():
    assert [column_number(c) for c in ("1", "12", "", "a", "-1", "１")] == [
        1,
        12,
        None,
        None,
        None,
        None,
    ]


def instructions(**changed):
    return InstructionsConfig(**({"train": ("a.jsonl",)} | changed))


def test_defaults_are_valid_and_frozen():
    assert InstructionsConfig().train == ()  # refused where it is read
    found = instructions()
    assert (found.packing, found.mask_prompt, found.dev, found.format) == (True, True, (), "auto")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.packing = False


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
        instructions(**{field: value})
    assert f"data.{field}" in str(caught.value)


@pytest.mark.parametrize(
    ("format", "template"), [("chat", "alpaca"), ("chat", "plain"), ("text", "vicuna")]
)
def test_a_template_must_be_able_to_write_the_format(format, template):
    why = f"data.template {template} cannot write records of the format {format}; use "
    with pytest.raises(ConfigError, match=why):
        instructions(format=format, template=template)
    instructions(format="auto", template=template)  # known only when the records are
    for possible in ("", *TEMPLATES_OF[format]):
        check_template(format, possible)
        instructions(format=format, template=possible)
