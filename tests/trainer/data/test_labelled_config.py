import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.data.labelled.config import LabelledConfig, column_number


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
