"""Makes batches as a pure function of the seed and the step, so that no loader state is saved.

Sequence ``i`` of step ``s`` starts at a position that depends on (seed, s, i) and on nothing else:
not on how many ranks share the step, nor on how a rank cuts its share into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.corpus.token_file import TokenFile

_WORD = 2**64 - 1
IGNORED = -100
"""Target that the loss leaves out. **Source:** ``ignore_index`` of torch's ``cross_entropy``."""


def batch(
    tokens: TokenFile, *, seed: int, step: int, sequences: range, block_size: int
) -> tuple[Tensor, Tensor]:
    """Draws the sequences of one step, independently of how ranks share them.

    ``batch(sequences=range(8))`` equals the concatenation of ``range(4)`` and ``range(4, 8)``: rank
    r of n with b sequences each takes ``range(r * b, (r + 1) * b)``.

    Returns:
        (inputs, targets), int64 of shape (len(sequences), block_size); the target of a position is
        the input of the next.

    Raises:
        DataError: There are fewer than block_size + 1 tokens, or the file has become unreadable.
    """
    places = _check_length(tokens, block_size)
    starts = [start_of_sequence(seed, step, number, places) for number in sequences]
    return _windows(tokens, starts, block_size)


def start_of_sequence(seed: int, step: int, number: int, places: int) -> int:
    """Draws where a sequence starts, uniformly from 0 to places - 1.

    Philox4x64-10 is a function from (key, counter) to random bits, so there is no state to carry.
    It is written out, as NumPy takes longer to make its generator than to draw from it. Its first
    64 bits u give ``floor(u * places / 2**64)``; no position is likelier than another by more
    than places / 2**64.

    **Source:** Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox);
    Lemire 2019, "Fast random integer generation in an interval" (the multiplication).
    """
    k0, k1 = seed, 0
    c0, c1, c2, c3 = 1, number, step, 0  # NumPy adds 1 to the first word before it draws
    for _ in range(10):
        p0, p2 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p2 >> 64) ^ c1 ^ k0, p2 & _WORD, (p0 >> 64) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _WORD, (k1 + 0xBB67AE8584CAA73B) & _WORD
    return c0 * places >> 64


def validation_batches(
    tokens: TokenFile, *, block_size: int, batch_size: int, max_batches: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walks through a file in windows that do not overlap, the same ones every time.

    Every token but the first is a target exactly once; the last window is padded with input 0 and
    target -100. With ``max_batches``, that many batches of windows spread evenly over the file.

    Yields:
        (inputs, targets), int64 of shape (at most batch_size, block_size).

    Raises:
        ConfigError: An argument is out of range.
        DataError: There are fewer than block_size + 1 tokens, or the file has become unreadable.
    """
    _check_length(tokens, block_size)
    for name, value in (("batch_size", batch_size), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    windows = -(-(tokens.count - 1) // block_size)
    used = windows if max_batches is None else min(windows, max_batches * batch_size)
    starts = [number * windows // used * block_size for number in range(used)]
    return (
        _windows(tokens, starts[first : first + batch_size], block_size)
        for first in range(0, used, batch_size)
    )


def _check_length(tokens: TokenFile, block_size: int) -> int:
    """Returns how many starts leave room for block_size inputs and their targets."""
    if tokens.count < block_size + 1:
        raise DataError(
            f"{tokens.count} tokens are too few for block_size {block_size}, which needs "
            f"{block_size + 1}; use block_size {max(tokens.count - 1, 1)} or less, "
            f"or more text"
        )
    return tokens.count - block_size


def _windows(tokens: TokenFile, starts: Sequence[int], block_size: int) -> tuple[Tensor, Tensor]:
    windows = tokens.windows(starts, block_size + 1)
    inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    for row, start in enumerate(starts):
        pairs = tokens.count - start - 1  # before the end of the file
        if pairs < block_size:
            inputs[row, pairs:], targets[row, pairs:] = 0, IGNORED
    return torch.from_numpy(inputs), torch.from_numpy(targets)
