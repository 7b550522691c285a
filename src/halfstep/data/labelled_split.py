"""Labelled texts without a dev file are split once, each class in the same proportion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfstep.data.random_bits import permutation
from halfstep.data.split import held_out
from halfstep.errors import DataError


def stratified_split(
    labels: Sequence[int], fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Holds a share of the examples of every class out.

    Every class with two or more examples has at least one in each part; a class with one keeps it
    in train. Within these bounds the sizes are those of ``dev_sizes``.

    Args:
        labels: Number of the class of each example, at least 0.
        fraction: Share to hold out, in (0, 1).
        seed: Decides which examples of a class are held out; 0 <= seed < 2**64.

    Returns:
        (train, dev): places in ``labels``, ascending; together every place once.

    Raises:
        DataError: No class has two examples, so nothing can be held out.
    """
    found = np.asarray(labels, dtype=np.int64)
    counts: npt.NDArray[np.int64] = np.bincount(found).astype(np.int64)
    if counts.max(initial=0) < 2:
        raise DataError(
            "data.train: no class has two texts, so none can be held out for evaluation; add "
            "texts or give data.dev"
        )
    sizes = np.array(dev_sizes(counts.tolist(), held_out(len(found), fraction)))
    # Examples in random order, then by class: an example's rank within its class decides.
    order = permutation("held out", seed, 0, len(found))
    order = order[np.argsort(found[order], kind="stable")]
    first = np.cumsum(counts) - counts
    rank = np.arange(len(found)) - np.repeat(first, counts)
    is_dev = np.zeros(len(found), dtype=np.bool_)
    is_dev[order] = rank < np.repeat(sizes, counts)
    return np.flatnonzero(~is_dev), np.flatnonzero(is_dev)


def dev_sizes(counts: Sequence[int], total: int) -> list[int]:
    """Shares ``total`` places out among classes by the largest remainder, within bounds.

    Each class gets at least 1 and at most n - 1 of its n examples (none of a single one). The
    shares add up to ``total`` as far as these bounds allow.

    Args:
        counts: Examples of each class, at least 0.
        total: Examples to hold out, at most the sum of ``counts``, which is at least 1.

    Returns:
        Examples to hold out of each class; of equal remainders the earlier class comes first.

    **Source:** the method of largest remainders (Hamilton's apportionment).
    """
    examples = sum(counts)
    low = [1 if count >= 2 else 0 for count in counts]
    high = [max(count - 1, 0) for count in counts]
    # Exact whole numbers throughout: the quota of a class is count * total / examples.
    sizes = [
        min(max(count * total // examples, least), most)
        for count, least, most in zip(counts, low, high, strict=True)
    ]
    while (wanted := total - sum(sizes)) != 0:
        up = wanted > 0
        open_classes = [
            c for c in range(len(counts)) if (sizes[c] < high[c] if up else sizes[c] > low[c])
        ]
        if not open_classes:
            return sizes
        sign = 1 if up else -1
        neediest = sorted(
            open_classes, key=lambda c: sign * (sizes[c] * examples - counts[c] * total)
        )
        for c in neediest[: abs(wanted)]:
            sizes[c] += sign
    return sizes


def single_examples(labels: Sequence[int]) -> list[int]:
    """Lists the classes that have exactly one example, in order."""
    return sorted(label for label, count in Counter(labels).items() if count == 1)
