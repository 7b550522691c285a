import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.data.config import DataConfig, InstructionsConfig, LabelledConfig


@pytest.mark.parametrize(
    ("config", "field", "value", "why"),
    [
        *((DataConfig, "validation_fraction", x, "must be between 0 and 1") for x in (0.0, 1.5)),
        (LabelledConfig, "dev_fraction", float("nan"), "must be between 0 and 1"),
        (InstructionsConfig, "dev_fraction", 1.0, "must be between 0 and 1"),
        (DataConfig, "validation", ("a", " "), "holds an empty path"),
        (LabelledConfig, "train", ("",), "holds an empty path"),
        (InstructionsConfig, "dev", ("",), "holds an empty path"),
        *(
            (DataConfig, "tokenizer", x, "must be bytes, bpe:N with N of at least 257")
            for x in ("bpe:", "bpe:256", "bpe:-5", "bpe:1e4")
        ),
        (LabelledConfig, "labels", ("a", "b", "a"), "holds 'a' twice"),
        (InstructionsConfig, "max_length", 1, "must be a whole number of at least 2"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(config, field, value, why):
    with pytest.raises(ConfigError) as error:
        config(**{field: value})
    assert f"data.{field} {why}" in str(error.value)
