import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.config.run import build
from halfstep.trainer.data.config import DataConfig, InstructionsConfig, LabelledConfig


@pytest.mark.parametrize(
    ("config", "field", "value", "why"),
    [
        *((DataConfig, "validation_fraction", x, "=") for x in (0.0, 1.5)),
        (InstructionsConfig, "dev_fraction", 1.0, "=1.0; allowed: 0 < x < 1"),
        (DataConfig, "validation", ("a", " "), " holds an empty path"),
        (LabelledConfig, "train", ("",), " holds an empty path"),
        (InstructionsConfig, "dev", ("",), " holds an empty path"),
        *(
            (DataConfig, "tokenizer", x, " must be bytes, bpe:N with N of at least 257")
            for x in ("bpe:", "bpe:256", "bpe:-5", "bpe:1e4")
        ),
        (LabelledConfig, "labels", ("a", "b", "a"), " holds 'a' twice"),
        (InstructionsConfig, "max_length", 1, "=1; allowed: integers >= 2"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(config, field, value, why):
    with pytest.raises(ConfigError) as error:
        build(config, {field: value}, "data.")
    assert f"data.{field}{why}" in str(error.value)
