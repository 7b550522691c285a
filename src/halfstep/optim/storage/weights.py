"""Weights of 16 bits: how an fp32 master is stored in them and in a remainder, and read again.

``master`` and ``store_`` are the definition for one chunk, which every kernel repeats.
``read_master`` and ``write_master_`` go through a whole tensor chunk by chunk, so that a tensor of
any size needs temporaries of a few MB only. What somebody has written into a weight since it was
stored is read as written: see :func:`halfstep.precision.masters.rounding.join`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.masters.rounding import (
    join,
    join24,
    kahan_join,
    kahan_split,
    random_bits,
    round_stochastic,
    split,
    split24,
)
from halfstep.precision.policy.policy import Update

# What is stored beside the weight.
REMAINDER_DTYPES: dict[Update, torch.dtype | None] = {
    "nearest": None,
    "split": torch.int16,
    "split24": torch.int8,
    "stochastic": None,
    "kahan": torch.bfloat16,
}
RANDOM: frozenset[Update] = frozenset({"split24", "stochastic"})

# Elements at a time: 256 KB of fp32, so that the dozen temporaries of a split stay in the caches.
_CHUNK = 1 << 16


def master(weight: Tensor, remainder: Tensor | None, update: Update) -> Tensor:
    """What the weight stands for, in fp32.

    Args:
        weight: fp32 or bf16, shape (n,).
        remainder: In the rounding mode's dtype, shape (n,), or None where there is none.
        update: The rounding mode.

    Raises:
        PrecisionError: If the rounding mode is not known.
    """
    if update not in REMAINDER_DTYPES:
        raise _unknown(update)
    if remainder is None:
        return weight.float()
    if update == "split":
        return join(weight, remainder)
    if update == "split24":
        return join24(weight, remainder)
    if update == "kahan":
        return kahan_join(weight, remainder)
    raise _without_remainder(update)


def store_(
    weight: Tensor, remainder: Tensor | None, update: Update, value: Tensor, random: Tensor | None
) -> None:
    """Write an fp32 master into a weight and its remainder, in place.

    Args:
        weight: fp32 or bf16, shape (n,).
        remainder: As for :func:`master`.
        update: The rounding mode.
        value: fp32, shape (n,).
        random: int32 random bits, shape (n,); None where the rounding mode draws none.

    Raises:
        PrecisionError: If the rounding mode is not known.
    """
    if update not in REMAINDER_DTYPES:
        raise _unknown(update)
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
    elif update == "kahan":
        parts = kahan_split(value)
    else:
        raise _without_remainder(update)
    weight.copy_(parts[0])
    remainder.copy_(parts[1])


def read_master(weight: Tensor, remainder: Tensor | None, update: Update) -> Tensor:
    """As :func:`master` for a tensor of any size; always memory of its own."""
    value = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for part, held in _chunks(weight, remainder):
        value[part].copy_(master(weight[part], held, update))
    return value


def write_master_(
    weight: Tensor,
    remainder: Tensor | None,
    update: Update,
    value: Tensor,
    *,
    seed: int,
    stream: int,
) -> None:
    """As :func:`store_` for a tensor of any size; draws random bits only where they are used.

    Args:
        weight: fp32 or bf16, shape (n,).
        remainder: As for :func:`master`.
        update: The rounding mode.
        value: Any floating dtype, shape (n,).
        seed: Of the random bits, which are those of step 0.
        stream: Which random bits are this tensor's.
    """
    for part, held in _chunks(weight, remainder):
        chunk, bits = value[part].float(), None
        if update in RANDOM:
            bits = random_bits(
                seed, 0, len(chunk), stream=stream, start=part.start, device=weight.device
            )
        store_(weight[part], held, update, chunk, bits)


def _chunks(weight: Tensor, remainder: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    for start in range(0, weight.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        yield part, None if remainder is None else remainder[part]


def _unknown(update: str) -> PrecisionError:
    return PrecisionError(f"update={update!r}; allowed: {', '.join(get_args(Update))}")


def _without_remainder(update: str) -> PrecisionError:
    return PrecisionError(
        f"a remainder was given for update={update!r}, which keeps none beside its weights"
    )
