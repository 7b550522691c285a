"""The shape of a text classifier from scratch as one frozen config, and its three named sizes."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from halfstep.errors import ConfigError
from halfstep.trainer.models.gpt.config import GPTConfig

MAX_NGRAM = 4
"""Longest n-gram that can be hashed; longer ones of short texts are nearly all seen once only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Every choice that defines an encoder with a classification head; wrong ones raise here.

    Raises:
        ConfigError: A field has the wrong type or range; the message holds ``model.<field>``.
    """

    labels: tuple[str, ...]
    """Names of the classes, in the order of their numbers; at least two, all different."""

    vocab_size: int
    """Number of token ids."""

    max_length: int
    """Number of positions: the longest text the model can see, in tokens, special ones included."""

    n_layer: int
    """Number of transformer blocks."""

    n_head: int
    """Attention heads of each block; divides ``n_embd``."""

    n_embd: int
    """Width of the residual stream."""

    ngram_orders: tuple[int, ...] = (1, 2, 3)
    """Lengths n of the n-grams of tokens whose presence moves the logits, each 1 to 4."""

    ngram_buckets: int = 131072
    """Rows of each n-gram table; n-grams that hash to the same row share it."""

    ngram_scale: float = 10.0
    """What the tables' rows are multiplied by: how much faster than the rest they learn."""

    ngram_dropout: float = 0.5
    """Probability, in ``[0, 1)``, of leaving out an n-gram of a text."""

    dropout: float = 0.3
    """Probability, in ``[0, 1)``, of zeroing a feature of a text in all its positions."""

    token_dropout: float = 0.2
    """Probability, in ``[0, 1)``, of zeroing all of one position's embedding."""

    layer_norm_eps: float = 1e-5
    """Added to the variance in every LayerNorm. **Source:** as in the GPT here."""

    def __post_init__(self) -> None:
        """Refuses what could not be built."""
        _check_labels(self.labels)
        for field in ("vocab_size", "max_length", "n_layer", "n_head", "n_embd", "ngram_buckets"):
            _check_integer(field, getattr(self, field), least=1)
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"model.n_embd must be divisible by model.n_head, got {self.n_embd} and "
                f"{self.n_head}"
            )
        orders = self.ngram_orders
        good = isinstance(orders, tuple) and all(type(n) is int for n in orders)
        if (
            not good
            or any(not 1 <= n <= MAX_NGRAM for n in orders)
            or len(set(orders)) < len(orders)
        ):
            raise ConfigError(
                f"model.ngram_orders must be different integers from 1 to {MAX_NGRAM}, "
                f"got {orders!r}"
            )
        for field in ("dropout", "token_dropout", "ngram_dropout"):
            value = getattr(self, field)
            if not _is_number(value) or not 0.0 <= value < 1.0:
                raise ConfigError(f"model.{field} must be in [0, 1), got {value!r}")
        if not _is_number(self.ngram_scale) or not 0.0 < self.ngram_scale < math.inf:
            raise ConfigError(f"model.ngram_scale must be positive, got {self.ngram_scale!r}")
        if not _is_number(self.layer_norm_eps) or not 0.0 < self.layer_norm_eps < 1.0:
            raise ConfigError(
                f"model.layer_norm_eps must be in (0, 1), got {self.layer_norm_eps!r}"
            )

    def as_gpt(self) -> GPTConfig:
        """The same widths in the words that the layers shared with the GPT take."""
        return GPTConfig(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            block_size=self.max_length,
            vocab_size=self.vocab_size,
            layer_norm_eps=self.layer_norm_eps,
        )


SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": MappingProxyType(
            {
                "n_layer": 2,
                "n_head": 2,
                "n_embd": 64,
                "ngram_buckets": 8192,
                "dropout": 0.1,
            }
        ),
        "small": MappingProxyType({"n_layer": 1, "n_head": 4, "n_embd": 128}),
        "base": MappingProxyType(
            {
                "n_layer": 6,
                "n_head": 8,
                "n_embd": 512,
                "ngram_buckets": 262144,
            }
        ),
    }
)
"""What the named sizes set; the rest is as in :class:`EncoderConfig`."""

VOCAB_SIZES: Mapping[str, int] = MappingProxyType({"tiny": 2048, "small": 4608, "base": 8192})
"""Most token ids of the tokenizer that is trained for each size."""

TABLE_NUMBERS: Mapping[str, int] = MappingProxyType({"tiny": 2**17, "small": 2**22, "base": 2**23})
"""Most numbers in the n-gram tables of each size: with many classes there are fewer buckets."""


def encoder_config(
    size: str, *, vocab_size: int, labels: Sequence[str], max_length: int, **changes: Any
) -> EncoderConfig:
    """The config of a named size.

    Args:
        size: ``"tiny"``, ``"small"`` or ``"base"``; ``scratch:`` may stand in front.
        vocab_size: The tokenizer's.
        labels: Names of the classes.
        max_length: Number of positions.
        changes: Fields to set otherwise than the size does.

    Raises:
        ConfigError: There is no such size, or a value is out of range.

    Example:
        >>> encoder_config("tiny", vocab_size=100, labels=["no", "yes"], max_length=32).n_embd
        64
    """
    name = size.removeprefix("scratch:")
    if name not in SIZES:
        near = difflib.get_close_matches(name, SIZES, n=1)
        hint = f", did you mean 'scratch:{near[0]}'" if near else ""
        allowed = ", ".join(f"scratch:{known}" for known in SIZES)
        raise ConfigError(f"there is no model {size!r}{hint}? Allowed: {allowed}")
    unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(EncoderConfig)})
    if unknown:
        raise ConfigError(f"model.{unknown[0]} is not a setting of the encoder")
    values = {**SIZES[name], **changes}
    config = EncoderConfig(
        vocab_size=vocab_size, labels=tuple(labels), max_length=max_length, **values
    )
    if "ngram_buckets" in changes or not config.ngram_orders:
        return config
    most = max(TABLE_NUMBERS[name] // (len(config.ngram_orders) * len(labels)), 1)
    return dataclasses.replace(config, ngram_buckets=min(config.ngram_buckets, most))


def _check_labels(labels: object) -> None:
    """Raises ConfigError unless these can be the names of classes."""
    if not isinstance(labels, tuple) or not all(isinstance(name, str) for name in labels):
        raise ConfigError(f"model.labels must be strings, got {labels!r}")
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ConfigError(f"model.labels must be two or more different names, got {list(labels)!r}")


def _check_integer(field: str, value: object, *, least: int) -> None:
    """Raises ConfigError unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"model.{field} must be an integer from {least}, got {value!r}")


def _is_number(value: object) -> bool:
    """True for int and float but not bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
