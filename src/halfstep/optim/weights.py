"""Weights: how an fp32 update reaches a weight of 16 bits, as one pair of functions per way."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.precision.policy import Update
from halfstep.precision.rounding import (
    join,
    join24,
    kahan_join,
    kahan_split,
    round_stochastic,
    split,
    split24,
)

# What is stored beside the weight.
REMAINDER_DTYPES: dict[Update, torch.dtype | None] = {
    "nearest": None,
    "split": torch.int16,
    "split24": torch.int8,
    "stochastic": None,
    "kahan": torch.bfloat16,
}
RANDOM: frozenset[Update] = frozenset({"split24", "stochastic"})


def master(weight: Tensor, remainder: Tensor | None, update: Update) -> Tensor:
    """What the weight stands for, in fp32.

    Args:
        weight: fp32 or bf16, shape (n,).
        remainder: In the way's dtype, shape (n,), or None where there is none.
        update: The way.
    """
    if remainder is None:
        return weight.float()
    if update == "split":
        return join(weight, remainder)
    if update == "split24":
        return join24(weight, remainder)
    return kahan_join(weight, remainder)


def store_(
    weight: Tensor, remainder: Tensor | None, update: Update, value: Tensor, random: Tensor | None
) -> None:
    """Write an fp32 master into a weight and its remainder, in place.

    Args:
        weight: fp32 or bf16, shape (n,).
        remainder: As for :func:`master`.
        update: The way.
        value: fp32, shape (n,).
        random: int32 random bits, shape (n,); None where the way draws none.
    """
    if update == "stochastic":
        assert random is not None
        weight.copy_(round_stochastic(value, random))
        return
    if remainder is None:
        weight.copy_(value)
        return
    if update == "split":
        parts = split(value)
    elif update == "split24":
        assert random is not None
        parts = split24(value, random)
    else:
        parts = kahan_split(value)
    weight.copy_(parts[0])
    remainder.copy_(parts[1])
