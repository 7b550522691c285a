"""Stores an fp32 master in a 16-bit weight and its remainder, and reads it again.

``master`` and ``store_`` are the definition for one chunk, which every kernel repeats.
``read_master`` and ``write_master_`` process a whole tensor chunk by chunk, so that a tensor of any
size needs only a few MB of temporaries. A weight that was written since it was stored is read as
written: see :func:`halfstep.precision.masters.rounding.join`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.masters.rounding import (
    ROUNDING,
    RoundingMode,
    Update,
    random_bits,
    rounding_mode,
)

# Elements per chunk: 256 KB of fp32, so that the dozen temporaries of a split stay in the caches.
_CHUNK = 1 << 16


def master(weight: Tensor, remainder: Tensor | None, update: Update) -> Tensor:
    """The fp32 value of a weight of shape (n,) and its remainder, if it has one."""
    join = _mode(update, remainder).join
    return weight.float() if remainder is None or join is None else join(weight, remainder)


def store_(
    weight: Tensor, remainder: Tensor | None, update: Update, value: Tensor, random: Tensor | None
) -> None:
    """Store an fp32 value in a weight and its remainder, in place.

    ``random`` are int32 random bits of shape (n,), or None if the rounding mode draws none.
    """
    mode = _mode(update, remainder)
    if mode.remainder_dtype is not None and remainder is None:
        mode = ROUNDING["nearest"]  # an fp32 weight needs none
    stored, rest = mode.split(value, random)
    weight.copy_(stored)
    if remainder is not None and rest is not None:
        remainder.copy_(rest)


def read_master(weight: Tensor, remainder: Tensor | None, update: Update) -> Tensor:
    """Like :func:`master`, for a tensor of any size; the result is always new memory."""
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
    """Like :func:`store_`, for a tensor of any size and a value of any floating dtype.

    Random bits, if the rounding mode needs them, are those of step 0 of this seed and stream.
    """
    draws = rounding_mode(update).random
    for part, held in _chunks(weight, remainder):
        chunk, bits = value[part].float(), None
        if draws:
            bits = random_bits(
                seed, 0, len(chunk), stream=stream, start=part.start, device=weight.device
            )
        store_(weight[part], held, update, chunk, bits)


def _chunks(weight: Tensor, remainder: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    for start in range(0, weight.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        yield part, None if remainder is None else remainder[part]


def _mode(update: Update, remainder: Tensor | None) -> RoundingMode:
    mode = rounding_mode(update)
    if remainder is not None and mode.remainder_dtype is None:
        raise PrecisionError(
            f"a remainder was given for update={update!r}, which keeps none beside its weights"
        )
    return mode
