"""Chooses the examples of each step, with similar lengths in a batch, as a pure function.

Similar lengths save padding, which costs as much as text. An epoch is shuffled and cut into windows
of ``WINDOW_BATCHES`` batches; each window is sorted by length and cut into batches, and the batches
are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.random_bits import permutation

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
