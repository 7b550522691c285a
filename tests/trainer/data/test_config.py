import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.data.config import DataConfig, bpe_size


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
