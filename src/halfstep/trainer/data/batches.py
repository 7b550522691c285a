"""Makes batches as pure functions of the seed and the step, so that no loader state is saved."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.config import LabelledTexts
from halfstep.trainer.data.token_file import ENCODE, Progress, TokenFile, no_progress


def philox_bits(purpose: str, seed: int, number: int, count: int) -> npt.NDArray[np.uint64]:
    """Draws the first ``count`` numbers of the stream (purpose, seed, number).

    The key of Philox is a hash, so that neighbouring seeds and numbers have nothing in common. The
    bits of Philox are the same on every platform and in every version of NumPy (what a
    ``Generator`` makes of them is not promised).

    Args:
        purpose: What the numbers are for, so that two uses of one seed get different streams.
        seed: 0 <= seed < 2**64.
        number: Epoch or step, 0 <= number < 2**64.
        count: How many, at least 0; a longer stream begins with the shorter one.

    **Source:** Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); NEP 19.
    """
    for name, value in (("seed", seed), ("epoch or step", number)):
        if not 0 <= value < 1 << 64:
            raise ConfigError(f"{name} must be at least 0 and below 2**64, got {value}")
    digest = hashlib.sha256(f"halfstep:{purpose}:{seed}:{number}".encode()).digest()
    words = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    key = np.array(words, dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count).astype(np.uint64, copy=False)


def permutation(purpose: str, seed: int, number: int, count: int) -> npt.NDArray[np.int64]:
    """Shuffles 0 to count - 1 by sorting random numbers; arguments as in ``random_bits``.

    Two of ``count`` numbers are equal with probability below count**2 / 2**65; those two keep
    their order.
    """
    bits = philox_bits(purpose, seed, number, count)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


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


CHUNK_TEXTS = 1024
"""Texts a tokenizer gets at once: enough to keep its threads busy, little memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Encoded texts with their labels."""

    ids: npt.NDArray[np.int32]
    """All tokens, example after example."""
    starts: npt.NDArray[np.int64]
    """(n + 1,): example i is ``ids[starts[i] : starts[i + 1]]``."""
    labels: npt.NDArray[np.int64]
    """(n,): number of the class."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(n,): tokens of each example, at least 1."""
        return np.diff(self.starts)


def encode_examples(
    encode_batch: Callable[[Sequence[str]], list[list[int]]],
    labelled: LabelledTexts,
    progress: Progress = no_progress,
) -> Examples:
    """Encodes every text in chunks, in order; ``progress`` is told in UTF-8 bytes.

    ``encode_batch`` turns texts into ids, with special tokens, not longer than the model allows.

    Raises:
        DataError: A text has no token at all.
    """
    texts = labelled.texts
    total, done = sum(len(text.encode()) for text in texts), 0
    lengths, ids = array("q", [0]), array("i")
    for first in range(0, len(texts), CHUNK_TEXTS):
        chunk = texts[first : first + CHUNK_TEXTS]
        rows = encode_batch(chunk)
        sizes = [len(row) for row in rows]
        if 0 in sizes:
            raise DataError(
                f"the tokenizer gives no token for the text {chunk[sizes.index(0)][:60]!r}; use a "
                f"tokenizer that adds special tokens, or remove the text"
            )
        lengths.extend(sizes)
        ids.extend(chain.from_iterable(rows))
        done += sum(len(text.encode()) for text in chunk)
        progress(ENCODE, done, total)
    return Examples(
        np.array(ids, dtype=np.int32),
        np.cumsum(lengths, dtype=np.int64),
        np.array(labelled.labels, dtype=np.int64),
    )


def padded(
    examples: Examples, indices: npt.NDArray[np.int64], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lays examples, by number, out as rows of one length, filled up with ``pad_id`` on the right.

    Returns:
        (ids_BT int64, mask_BT bool, labels_B int64), T the longest of these examples; the mask is
        True at real tokens. B may be 0, then T is 0.
    """
    starts = examples.starts[indices]
    lengths = examples.lengths[indices]
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    for row, start, length in zip(ids, starts, lengths, strict=True):
        row[:length] = examples.ids[start : start + length]
    return (
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        torch.from_numpy(examples.labels[indices].astype(np.int64)),
    )


Indices = npt.NDArray[np.int64]

WINDOW_BATCHES = 50
"""Number of batches sorted by length together: leaves little padding, yet batches vary by epoch.

**Source:** ``LengthGroupedSampler`` of transformers, ``mega_batch_mult`` of at most 50.
"""


class EpochBatches:
    """The global batches of a training run; each epoch holds every example exactly once.

    Its only state is a cache of orders, so every rank can ask for any step in any order, and a
    resumed run needs no loader state.
    """

    def __init__(self, lengths: npt.ArrayLike, batch_size: int, seed: int) -> None:
        """Takes (n,) tokens of each example, batches of at most ``batch_size``, and a seed."""
        self._lengths = _checked(lengths, batch_size)
        self._seed = seed
        count = len(self._lengths)
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
        """Returns the example numbers of a step's global batch, shortest first, as a copy.

        Steps are counted from 0 over all epochs.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        order, batches = self._epoch(epoch)
        batch = int(batches[place])
        return order[self._starts[batch] : self._starts[batch + 1]].copy()

    def _orders(self, epoch: int) -> tuple[Indices, Indices]:
        """Computes the order of an epoch's examples, and that of its batches."""
        order = permutation("examples of an epoch", self._seed, epoch, len(self._lengths))
        lengths = self._lengths[order]
        # One sort for all windows; it is stable, so equal lengths stay shuffled.
        within = self._window * (int(lengths.max()) + 1) + lengths
        order = order[np.argsort(within, kind="stable")]
        return order, permutation("batches of an epoch", self._seed, epoch, self.steps_per_epoch)


def evaluation_batches(lengths: npt.ArrayLike, batch_size: int) -> list[Indices]:
    """Cuts all examples, sorted by length, into batches: every example once, shortest first.

    Equal lengths keep their order, and only the last batch may be smaller.
    """
    order = np.argsort(_checked(lengths, batch_size), kind="stable").astype(np.int64, copy=False)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def evaluation_shares(
    lengths: npt.ArrayLike, batch_size: int, most: int = 0, rank: int = 0, ranks: int = 1
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


def _checked(lengths: npt.ArrayLike, batch_size: int) -> Indices:
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    found: Indices = np.array(lengths, dtype=np.int64)  # a copy: the caller's may change
    if not len(found):
        raise DataError("there is no example to make batches of; check the data")
    return found
