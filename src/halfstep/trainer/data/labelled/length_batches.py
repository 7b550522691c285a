"""Which examples a step trains on: a pure function, with similar lengths in a batch.

Padding costs as much as text. An epoch is shuffled, cut into windows of ``WINDOW_BATCHES`` batches,
each window is sorted by length and cut into batches, and the batches are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.random_bits import permutation

Indices = npt.NDArray[np.int64]

WINDOW_BATCHES = 50
"""Batches sorted by length together: little padding is left, and who meets whom still changes.

**Source:** ``LengthGroupedSampler`` of transformers, ``mega_batch_mult`` of at most 50.
"""


class EpochBatches:
    """The global batches of a training run; each epoch holds every example exactly once.

    Nothing changes the object but a cache of one epoch's order, so every rank can ask for any step
    in any order and a resumed run needs no loader state.
    """

    def __init__(self, lengths: npt.ArrayLike, batch_size: int, seed: int) -> None:
        """Takes (n,) tokens of each example, batches of at most ``batch_size``, and a seed.

        Raises:
            ConfigError: ``batch_size`` or ``seed`` is out of range.
            DataError: There is no example.
        """
        self._lengths = _checked(lengths, batch_size)
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed must be at least 0 and below 2**64, got {seed}")
        self._seed = seed
        count = len(self._lengths)
        self.steps_per_epoch: int = -(-count // batch_size)
        """Batches in an epoch; none is dropped and none is nearly empty."""
        # Cuts at i*n/S: sizes differ by at most one. Windows are whole batches, shared out alike.
        steps = self.steps_per_epoch
        self._starts: Indices = np.arange(steps + 1, dtype=np.int64) * count // steps
        windows = max(1, steps // WINDOW_BATCHES)
        cuts = self._starts[np.arange(1, windows, dtype=np.int64) * steps // windows]
        self._window: Indices = np.searchsorted(cuts, np.arange(count), side="right").astype(
            np.int64
        )
        self._cached: tuple[int, Indices, Indices] | None = None

    def indices(self, step: int) -> Indices:
        """Numbers of the examples in the global batch of a step, shortest first; a copy.

        Args:
            step: Counted from 0 over all epochs.

        Raises:
            ConfigError: The step is negative.
        """
        if step < 0:
            raise ConfigError(f"step must not be negative, got {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, *self._epoch(epoch))
        _, order, batches = self._cached
        batch = int(batches[place])
        return order[self._starts[batch] : self._starts[batch + 1]].copy()

    def _epoch(self, epoch: int) -> tuple[Indices, Indices]:
        """Orders the examples of an epoch, and its batches."""
        order = permutation("examples of an epoch", self._seed, epoch, len(self._lengths))
        lengths = self._lengths[order]
        # One sort for all windows; it is stable, so equal lengths stay shuffled.
        within = self._window * (int(lengths.max()) + 1) + lengths
        order = order[np.argsort(within, kind="stable")]
        return order, permutation("batches of an epoch", self._seed, epoch, self.steps_per_epoch)


def evaluation_batches(lengths: npt.ArrayLike, batch_size: int) -> list[Indices]:
    """Cuts all examples, sorted by length, into batches: every example once, shortest first.

    Returns:
        Numbers of examples; equal lengths keep their order, and only the last batch may be smaller.

    Raises:
        ConfigError: ``batch_size`` is below 1.
        DataError: There is no example.
    """
    order = np.argsort(_checked(lengths, batch_size), kind="stable").astype(np.int64, copy=False)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def evaluation_shares(
    lengths: npt.ArrayLike, batch_size: int, most: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Indices, bool]]:
    """A rank's batches of an evaluation, every ``ranks``-th; each rank gets as many.

    Args:
        lengths: As of :func:`evaluation_batches`.
        batch_size: Likewise.
        most: Most batches, spread evenly over all; 0: all of them.
        rank: Of the ranks with different rows.
        ranks: How many there are.

    Yields:
        Numbers of examples, and whether they count: where batches run out before ranks, a rank
        gets one example that another rank has, so that all ranks run as often.
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
    if found.ndim != 1 or not len(found):
        raise DataError("there is no example to make batches of; check the data")
    assert found.min() >= 0
    return found
