"""The shape of a GPT: one frozen config, and the named sizes as plain data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Every choice that defines a GPT-2 style network; wrong ones raise at construction.

    Raises:
        ConfigError: A field has the wrong type or range; the message holds ``model.<field>``.
    """

    n_layer: int
    """Number of transformer blocks."""

    n_head: int
    """Attention heads of each block; divides ``n_embd``."""

    n_embd: int
    """Width of the residual stream."""

    block_size: int
    """Number of positions: the longest sequence the model can see, in tokens."""

    vocab_size: int = 0
    """Number of token ids, and of logits; 0 in a run's configuration: the tokenizer's."""

    dropout: float = 0.0
    """Probability, in ``[0, 1)``, of zeroing an embedding, attention weight or block output."""

    activation_checkpointing: bool = False
    """Recompute each block in backward instead of keeping its activations; same gradients."""

    layer_norm_eps: float = 1e-5
    """Added to the variance in every LayerNorm. **Source:** GPT-2's released configuration."""

    def __post_init__(self) -> None:
        """Refuses what could not be built."""
        for field in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            value = getattr(self, field)
            least = 0 if field == "vocab_size" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"model.{field} must be an integer from {least}, got {value!r}")
        if self.n_embd % self.n_head:
            below = self.n_embd // self.n_head * self.n_head
            near = " or ".join(str(width) for width in (below, below + self.n_head) if width)
            raise ConfigError(
                f"model.n_embd must be divisible by model.n_head, got {self.n_embd} and "
                f"{self.n_head}; take a width of {near}"
            )
        if not _is_number(self.dropout) or not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout must be in [0, 1), got {self.dropout!r}")
        if not isinstance(self.activation_checkpointing, bool):
            raise ConfigError(
                "model.activation_checkpointing must be true or false, "
                f"got {self.activation_checkpointing!r}"
            )
        if not _is_number(self.layer_norm_eps) or not 0.0 < self.layer_norm_eps < 1.0:
            raise ConfigError(
                f"model.layer_norm_eps must be in (0, 1), got {self.layer_norm_eps!r}"
            )

    @classmethod
    def named(cls, name: str, **overrides: Any) -> GPTConfig:
        """The config of ``GPT_SIZES[name]`` with some fields replaced.

        Example:
            >>> GPTConfig.named("gpt-tiny", vocab_size=512).n_layer
            4

        Raises:
            ConfigError: No such size, or an override that the config refuses.
        """
        if name not in GPT_SIZES:
            near = difflib.get_close_matches(name, GPT_SIZES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"model.size {name!r} is unknown; allowed are {', '.join(GPT_SIZES)}.{hint}"
            )
        unknown = sorted(overrides.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise ConfigError(f"model.{unknown[0]} is not a field of the model")
        return cls(**{**GPT_SIZES[name], **overrides})


GPT_SIZES: dict[str, dict[str, Any]] = {
    "gpt-tiny": dict(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=256),
    "gpt-small-cpu": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=8192),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, block_size=1024, vocab_size=50257),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280, block_size=1024, vocab_size=50257),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, block_size=1024, vocab_size=50257),
}
"""Sizes by name; ``vocab_size`` is meant to be replaced by the tokenizer's.

gpt-tiny has 0.85 M parameters with 256 tokens and 1.86 M with 8192; gpt-small-cpu 13.9 M.

**Source:** gpt2 to gpt2-xl are table 2 of Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", with the head counts of the released models.
"""


def _is_number(value: object) -> bool:
    """True for int and float but not bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
