"""EncoderConfig refuses what cannot be built, and the named sizes are what they promise."""

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.models.encoder.config import SIZES, VOCAB_SIZES, EncoderConfig, encoder_config
from halfstep.trainer.models.encoder.encoder import Encoder

GOOD = {
    "labels": ("no", "yes"),
    "vocab_size": 9,
    "max_length": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 4,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", ("one",)),
        ("labels", ("a", "a")),
        ("labels", "ab"),
        ("labels", (1, 2)),
        ("vocab_size", 0),
        ("vocab_size", True),
        ("max_length", 0),
        ("n_layer", 0),
        ("n_head", 3),
        ("n_embd", 4.0),
        ("ngram_orders", (0,)),
        ("ngram_orders", (5,)),
        ("ngram_orders", (2, 2)),
        ("ngram_orders", [2]),
        ("ngram_buckets", 0),
        ("ngram_scale", 0.0),
        ("ngram_scale", float("inf")),
        ("ngram_dropout", 1.0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", float("nan")),
        ("dropout", "0.1"),
        ("token_dropout", 1.0),
        ("layer_norm_eps", 0.0),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match="model"):
        EncoderConfig(**{**GOOD, field: value})


def test_the_defaults_are_accepted():
    assert EncoderConfig(**GOOD).labels == ("no", "yes")


@pytest.mark.parametrize(("size", "most"), [("tiny", 1_000_000), ("small", 10_000_000)])
def test_a_size_is_as_small_as_promised_with_its_whole_vocabulary(size, most):
    labels = [str(i) for i in range(20)]
    config = encoder_config(size, vocab_size=VOCAB_SIZES[size], labels=labels, max_length=512)
    assert Encoder(config).num_parameters() < most


@pytest.mark.parametrize("classes", [2, 6, 100, 1000])
def test_many_classes_do_not_make_a_size_large(classes):
    labels = [str(i) for i in range(classes)]
    config = encoder_config("small", vocab_size=4608, labels=labels, max_length=128)
    assert Encoder(config).num_parameters() < 6_000_000
    assert config.ngram_buckets == {2: 131072, 6: 131072, 100: 13981, 1000: 1398}[classes]
    asked = encoder_config("tiny", vocab_size=9, labels=labels, max_length=8, ngram_buckets=9000)
    assert asked.ngram_buckets == 9000


def test_sizes_grow():
    counts = []
    for size in ("tiny", "small", "base"):
        config = encoder_config(size, vocab_size=VOCAB_SIZES[size], labels=["a", "b"], max_length=8)
        counts.append(Encoder(config).num_parameters())
    assert counts == sorted(counts)
    assert set(SIZES) == set(VOCAB_SIZES)


def test_a_size_can_be_changed_and_spelled_as_on_the_command_line():
    config = encoder_config(
        "scratch:tiny", vocab_size=9, labels=["a", "b"], max_length=8, dropout=0.0
    )
    assert config.dropout == 0.0
    assert config.n_embd == SIZES["tiny"]["n_embd"]


def test_an_unknown_size_or_setting_is_refused_with_what_is_allowed():
    with pytest.raises(ConfigError, match=r"'smal', did you mean 'scratch:small'\? Allowed: scr"):
        encoder_config("smal", vocab_size=9, labels=["a", "b"], max_length=8)
    with pytest.raises(ConfigError, match=r"model\.depth is not a setting"):
        encoder_config("tiny", vocab_size=9, labels=["a", "b"], max_length=8, depth=3)
