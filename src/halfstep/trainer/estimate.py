"""The memory of a configuration's training step, or of a model that is only a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from halfstep.diagnostics.memory.estimate import estimate
from halfstep.diagnostics.memory.table import Memory
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.models.gpt.gpt import GPT

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def estimate_count(count: int, policies: Sequence[PrecisionPolicy], ranks: int) -> list[Memory]:
    """What training holds for that many parameters, under each policy, without a batch."""
    with torch.device("meta"):
        model = nn.Linear(count, 1, bias=False)
    return [estimate(model, policy, None, ranks=ranks) for policy in policies]


def estimate_config(
    spec: str, policies: Sequence[PrecisionPolicy], rows: int, ranks: int
) -> list[Memory]:
    """What a step of a configuration's GPT holds under each policy.

    Args:
        spec: As for :func:`halfstep.trainer.config.config.load_config`.
        policies: The policies.
        rows: Sequences of one micro-batch; 0: the configuration's.
        ranks: Ranks that share weights, gradients and optimizer state.

    Raises:
        ConfigError: For a task whose model is not described by its configuration.
    """
    config = load_config(spec)
    if not isinstance(config, TrainConfig) or config.run.init_from:
        raise ConfigError(
            f"--config {spec} loads its model from a folder; halfstep.estimate(model, policy, "
            "batch) answers for any model, or give --params"
        )
    shape = config.model
    vocabulary = shape.vocab_size or _vocabulary(config.data.tokenizer)
    with torch.device("meta"):
        model = _Step(GPT(dataclasses.replace(shape, vocab_size=vocabulary)))
        rows = rows or max(1, config.run.batch_size // config.run.grad_accum)
        tokens = torch.empty(rows, config.block_size, dtype=torch.int64)
    return [
        estimate(model, policy, (tokens, tokens), loss=_itself, logits=vocabulary, ranks=ranks)
        for policy in policies
    ]


def read_count(text: str, option: str) -> int:
    """Read a number with a unit: ``1.3B``, ``124M``, ``16GB``, ``7e9``.

    Raises:
        ConfigError: Naming the option.
    """
    plain = text.strip().lower().replace("_", "")
    if len(plain) > 1 and plain.endswith("b") and plain[-2] in _UNITS:  # GB
        plain = plain[:-1]
    factor = _UNITS.get(plain[-1:], 1)
    try:
        count = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        count = 0.0
    if not 1 <= count < 2**60:
        raise ConfigError(f"{option} {text!r}; allowed: a number from 1, such as 1.3B or 124M")
    return round(count)


class _Step(nn.Module):
    """A GPT whose forward is its loss, as the trainer computes it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss of a batch, a scalar."""
        total, count = self.model.loss_sum((tokens_BT, targets_BT))
        return total / count


def _itself(loss: Tensor) -> Tensor:
    return loss


def _vocabulary(tokenizer: str) -> int:
    """The number of tokens that a tokenizer's spelling names."""
    if tokenizer == "bytes":
        return 256
    kind, _, size = tokenizer.partition(":")
    if kind == "bpe" and size.isdecimal():
        return int(size)
    raise ConfigError(
        f"data.tokenizer={tokenizer}: its vocabulary is in its file; set model.vocab_size in the "
        "configuration"
    )
