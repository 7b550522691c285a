"""Shapes of the networks that ``halfstep train`` makes: the section ``model`` of a configuration.

Each is one frozen dataclass; named sizes are the files in ``configs/``. This file imports no torch,
so that --help is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from halfstep.errors import ConfigError
from halfstep.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The fields that define a GPT-2 style network; invalid values raise at construction.

    Raises:
        ConfigError: If a field has the wrong type or range; the message names ``model.<field>``.
    """

    n_layer: int = field(metadata={"help": "Number of transformer blocks."})

    n_head: int = field(metadata={"help": "Attention heads of each block; divides n_embd."})

    n_embd: int = field(metadata={"help": "Width of the residual stream."})

    block_size: int = field(
        metadata={"help": "Number of positions: the longest sequence the model can see, in tokens."}
    )

    vocab_size: int = option(
        0, "Number of token ids, and of logits; 0 in a run's configuration: as in the tokenizer."
    )

    dropout: float = option(
        0.0, "Probability, in [0, 1), of zeroing an embedding, attention weight or block output."
    )

    activation_checkpointing: bool = option(
        False,
        "Recompute each block in backward instead of keeping its activations; same gradients.",
    )

    layer_norm_eps: float = option(
        1e-5,
        "Added to the variance in every LayerNorm. **Source:** GPT-2's released configuration.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no network could be built with."""
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            value = getattr(self, name)
            least = 0 if name == "vocab_size" else 1
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"model.{name} must be an integer from {least}, got {value!r}")
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"model.n_embd must be divisible by model.n_head, got {self.n_embd} and "
                f"{self.n_head}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout must be in [0, 1), got {self.dropout!r}")
        if not 0.0 < self.layer_norm_eps < 1.0:
            raise ConfigError(
                f"model.layer_norm_eps must be in (0, 1), got {self.layer_norm_eps!r}"
            )

    @property
    def parameters(self) -> int:
        """Number of parameters, computed without building them; no token table at vocab_size 0.

        With width C: the tables of tokens and positions, the last norm's 2 C, and in each block
        12 C^2 + 13 C: attention's 4 C^2 + 4 C, the MLP's 8 C^2 + 5 C and two norms' 4 C.
        """
        width = self.n_embd
        block = 12 * width * width + 13 * width
        return (self.vocab_size + self.block_size + 2) * width + self.n_layer * block
