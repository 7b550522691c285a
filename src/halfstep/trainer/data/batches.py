"""Makes batches as pure functions of the seed and the step, so that no loader state is saved.

Those of a text are windows of a token file: raw little-endian integers on disk.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.errors import DataError
from halfstep.trainer.models import IGNORE_INDEX

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The tokens of a prepared text."""

    path: Path
    dtype: Literal["uint16", "uint32"]  # little-endian
    count: int  # tokens, at least 1
    text_bytes: int  # of the text they encode in UTF-8, separators of one newline included
    sha256: str  # of the stored bytes

    @property
    def density(self) -> float:
        """Tokens per UTF-8 byte of the text."""
        return self.count / self.text_bytes

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    def windows(self, starts: Sequence[int], length: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Reads the ``length`` tokens from each start on, ``(starts, length)``.

        There are zeros where the tokens end before. They are read and not mapped: a map that lives
        on keeps every page it ever touched in the memory of the process.
        """
        found = np.zeros((len(starts), length), self.stored)
        with open(self.path, "rb", buffering=0) as file:
            for row, start in zip(found, starts, strict=True):
                file.seek(start * self.stored.itemsize)
                wanted = min(length, self.count - start)
                part = np.fromfile(file, self.stored, wanted)
                if len(part) < wanted:
                    raise DataError(f"{self.path}: was cut; remove its folder to prepare it again")
                row[:wanted] = part
        return found


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts and the numbers of their classes, side by side."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)


CHUNK_TEXTS = 1024
"""Texts a tokenizer gets at once: enough to keep its threads busy, little memory."""


def permutation(purpose: str, seed: int, number: int, count: int) -> Indices:
    """Shuffles 0 to count - 1 by sorting the bits of the stream (purpose, seed, number).

    The key of Philox is a hash, so that neighbouring seeds and numbers have nothing in common. The
    bits of Philox are the same on every platform and in every version of NumPy (what a
    ``Generator`` makes of them is not promised). Two of ``count`` numbers are equal with
    probability below count**2 / 2**65; those two keep their order. The purpose keeps two uses of
    one seed apart; ``number`` is the epoch.

    **Source:** Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); NEP 19.
    """
    digest = hashlib.sha256(f"halfstep:{purpose}:{seed}:{number}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def held_out(total: int, fraction: float) -> int:
    """Rounds a share of ``total`` units so that, of at least two, neither part is empty."""
    return max(1, min(round(total * fraction), total - 1))


def batch(
    tokens: TokenFile, *, seed: int, step: int, sequences: range, block_size: int
) -> tuple[Tensor, Tensor]:
    """Draws the sequences of one step, independently of how ranks share them.

    ``batch(sequences=range(8))`` equals the concatenation of ``range(4)`` and ``range(4, 8)``: rank
    r of n with b sequences each takes ``range(r * b, (r + 1) * b)``.

    Returns:
        (inputs, targets), int64 of shape (len(sequences), block_size); the target of a position is
        the input of the next.
    """
    places = require_block(tokens, block_size)
    starts = [start_of_sequence(seed, step, number, places) for number in sequences]
    return _windows(tokens, starts, block_size)


def start_of_sequence(seed: int, step: int, number: int, places: int) -> int:
    """Draws where a sequence starts, uniformly from 0 to places - 1.

    Philox is a function from (key, counter) to random bits, so there is no state to carry. Its
    first 64 bits u give ``floor(u * places / 2**64)``; no position is likelier than another by more
    than places / 2**64.

    **Source:** Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox);
    Lemire 2019, "Fast random integer generation in an interval" (the multiplication).
    """
    bits = np.random.Philox(key=seed, counter=step << 128 | number << 64).random_raw()
    return int(bits) * places >> 64


def validation_batches(
    tokens: TokenFile, *, block_size: int, batch_size: int, max_batches: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walks through a file in windows that do not overlap, the same ones every time.

    Every token but the first is a target exactly once; the last window is padded with input 0 and
    target -100. With ``max_batches``, that many batches of windows spread evenly over the file.

    Yields:
        (inputs, targets), int64 of shape (at most batch_size, block_size).
    """
    require_block(tokens, block_size)
    windows = -(-(tokens.count - 1) // block_size)
    used = windows if max_batches is None else min(windows, max_batches * batch_size)
    starts = [number * windows // used * block_size for number in range(used)]
    return (
        _windows(tokens, starts[first : first + batch_size], block_size)
        for first in range(0, used, batch_size)
    )


def require_block(tokens: TokenFile, block_size: int) -> int:
    """Returns how many starts leave room for block_size inputs and their targets, at least 1."""
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
            inputs[row, pairs:], targets[row, pairs:] = 0, IGNORE_INDEX
    return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Encoded texts with their labels."""

    ids: npt.NDArray[np.int32]  # all tokens, example after example
    starts: Indices  # (n + 1,): example i is ids[starts[i] : starts[i + 1]]
    labels: Indices  # (n,): number of the class

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Indices:
        """(n,): tokens of each example."""
        return np.diff(self.starts)


def encode_examples(
    encode_batch: Callable[[Sequence[str]], list[list[int]]], labelled: LabelledTexts
) -> Examples:
    """Encodes every text, in order, by ``encode_batch``, which adds special tokens and cuts."""
    ids, lengths = array("i"), [0]
    for first in range(0, len(labelled), CHUNK_TEXTS):
        chunk = labelled.texts[first : first + CHUNK_TEXTS]
        for text, row in zip(chunk, encode_batch(chunk), strict=True):
            if not row:
                raise DataError(
                    f"the tokenizer gives no token for the text {text[:60]!r}; use a tokenizer "
                    f"that adds special tokens, or remove the text"
                )
            ids.extend(row)
            lengths.append(len(row))
    return Examples(
        np.array(ids, dtype=np.int32),
        np.cumsum(lengths, dtype=np.int64),
        np.array(labelled.labels, dtype=np.int64),
    )


def padded(
    values: npt.NDArray[Any], starts: Indices, numbers: Indices, fill: int
) -> tuple[Tensor, Tensor]:
    """Lays rows, by number, out in one length, filled up on the right.

    Args:
        values: (n,): row after row.
        starts: Where each row begins in them, and the end of the last.
        numbers: (B,): which rows; B may be 0.
        fill: What follows a row.

    Returns:
        (values_BT int64, mask_BT bool), T the longest of these rows; True at what is no filling.
    """
    firsts, lengths = starts[numbers], np.diff(starts)[numbers]
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    found = np.full(mask.shape, fill, dtype=np.int64)
    for row, first, length in zip(found, firsts, lengths, strict=True):
        row[:length] = values[first : first + length]
    return torch.from_numpy(found), torch.from_numpy(mask)


WINDOW_BATCHES = 50
"""Number of batches sorted by length together: leaves little padding, yet batches vary by epoch.

**Source:** ``LengthGroupedSampler`` of transformers, ``mega_batch_mult`` of at most 50.
"""


class EpochBatches:
    """The global batches of a training run; each epoch holds every example exactly once.

    Its only state is a cache of orders, so every rank can ask for any step in any order, and a
    resumed run needs no loader state.
    """

    def __init__(self, lengths: Indices, batch_size: int, seed: int) -> None:
        """Takes (n,) tokens of each example, batches of at most ``batch_size``, and a seed."""
        self._lengths = lengths
        self._seed = seed
        count = len(lengths)
        self.steps_per_epoch: int = -(-count // batch_size)
        """Number of batches in an epoch; none is dropped and none is nearly empty."""
        # Cuts at i*n/S: sizes differ by at most one. Windows are whole batches, shared out alike.
        steps = self.steps_per_epoch
        self._starts: Indices = np.arange(steps + 1, dtype=np.int64) * count // steps
        windows = max(1, steps // WINDOW_BATCHES)
        cuts = self._starts[np.arange(1, windows, dtype=np.int64) * steps // windows]
        self._window = np.searchsorted(cuts, np.arange(count), side="right")
        # Cache two epochs, as batches made ahead are of the next epoch while this one is read.
        self._epoch = lru_cache(maxsize=2)(self._orders)

    def indices(self, step: int) -> Indices:
        """Returns the example numbers of a step's global batch, shortest first.

        Steps are counted from 0 over all epochs.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        order, batches = self._epoch(epoch)
        batch = int(batches[place])
        return order[self._starts[batch] : self._starts[batch + 1]]

    def _orders(self, epoch: int) -> tuple[Indices, Indices]:
        """Computes the order of an epoch's examples, and that of its batches."""
        order = permutation("examples of an epoch", self._seed, epoch, len(self._lengths))
        lengths = self._lengths[order]
        # One sort for all windows; it is stable, so equal lengths stay shuffled.
        within = self._window * (int(lengths.max()) + 1) + lengths
        order = order[np.argsort(within, kind="stable")]
        return order, permutation("batches of an epoch", self._seed, epoch, self.steps_per_epoch)


def evaluation_batches(lengths: Indices, batch_size: int) -> list[Indices]:
    """Cuts all examples, sorted by length, into batches: every example once, shortest first.

    Equal lengths keep their order, and only the last batch may be smaller.
    """
    order = np.argsort(lengths, kind="stable").astype(np.int64, copy=False)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def evaluation_shares(
    lengths: Indices, batch_size: int, most: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Indices, bool]]:
    """Deals every ``ranks``-th batch of an evaluation to this rank; each rank gets equally many.

    At most ``most`` batches are used, spread evenly over all of them; 0 means all.

    Yields:
        Numbers of examples, and whether they count: a rank without a last batch gets an example
        that another rank has, so that all ranks run equally many forwards, as collectives require.
    """
    batches = evaluation_batches(lengths, batch_size)
    count = min(most, len(batches)) or len(batches)
    chosen = [batches[number * len(batches) // count] for number in range(count)]
    for mine in range(rank, math.ceil(count / ranks) * ranks, ranks):
        yield (chosen[mine], True) if mine < count else (chosen[0][:1], False)


def dealt(
    shares: Iterable[tuple[Indices, bool]],
    make: Callable[[Indices], tuple[Tensor, ...]],
    place: int,
) -> Iterator[tuple[Tensor, ...]]:
    """Makes the batches of :func:`evaluation_shares`; one that does not count has no target.

    Targets, or labels, are at that place in a batch.
    """
    for numbers, counts in shares:
        batch = [*make(numbers)]
        if not counts:
            batch[place] = torch.full_like(batch[place], IGNORE_INDEX)
        yield tuple(batch)
