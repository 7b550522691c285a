"""The models that runs train. This file imports no torch, so that --help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfstep.errors import ConfigError
from halfstep.option import AtLeast1, Count, Positive, Share, option

IGNORE_INDEX = -100
"""Target of a token that is not counted. **Source:** default of ``torch.nn.CrossEntropyLoss``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT-2 style network; named sizes are the files in ``configs/``."""

    n_layer: AtLeast1 = field(metadata={"help": "Number of transformer blocks."})

    n_head: AtLeast1 = field(metadata={"help": "Attention heads of each block; divides n_embd."})

    n_embd: AtLeast1 = field(metadata={"help": "Width of the residual stream."})

    block_size: AtLeast1 = field(
        metadata={"help": "Number of positions: the longest sequence the model can see, in tokens."}
    )

    vocab_size: Count = option(
        0, "Number of token ids, and of logits; 0 in a run's configuration: as in the tokenizer."
    )

    dropout: Share = option(
        0.0, "Probability, in [0, 1), of zeroing an embedding, attention weight or block output."
    )

    activation_checkpointing: bool = option(
        False,
        "Recompute each block in backward instead of keeping its activations; same gradients.",
    )

    layer_norm_eps: Positive = option(
        1e-5,
        "Added to the variance in every LayerNorm. **Source:** GPT-2's released configuration.",
    )

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"model.n_embd must be divisible by model.n_head, got {self.n_embd} and "
                f"{self.n_head}"
            )
