"""A wrong shape is refused with the name of its field."""

from __future__ import annotations

import dataclasses

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.models.shapes import GPTConfig

GOOD = dict(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(f, v) for f in GOOD for v in (-1, 1.0, "2", None)],
        *[(f, 0) for f in GOOD if f != "vocab_size"],  # 0 there: the tokenizer's
        ("n_head", 3),
        *[("dropout", v) for v in (1.0, -0.1, float("nan"))],
        *[("layer_norm_eps", v) for v in (0.0, -1e-5, 1.0, float("nan"))],
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"model\.{field}"):
        GPTConfig(**{**GOOD, field: value})


def test_indivisible_width_says_the_nearest():
    with pytest.raises(ConfigError, match=r"got 16 and 5; take a width of 15 or 20"):
        GPTConfig(**{**GOOD, "n_head": 5})
    with pytest.raises(ConfigError, match=r"got 16 and 20; take a width of 20$"):
        GPTConfig(**{**GOOD, "n_head": 20})


def test_configs_are_values():
    a = GPTConfig(**GOOD)
    assert a == GPTConfig(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.n_layer = 3
    with pytest.raises(TypeError):
        GPTConfig(2, 2, 16, 8, 11)
