"""Packs encoded documents into rows: long documents are cut, and several may share a row.

A row holds documents end to end, so that few positions are padding. Position ids restart at 0 where
a document begins, by which a model tells documents apart, and no target crosses into the next one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from halfstep.trainer.data.batches import Indices
from halfstep.trainer.models.causal_lm import LMBatch
from halfstep.trainer.models.cross_entropy import IGNORE_INDEX


class Encoded(NamedTuple):
    """A document as tokens."""

    ids: npt.NDArray[np.int32]  # (tokens,)
    learned: npt.NDArray[np.bool_]  # (tokens,), False at the first


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or several documents, in flat arrays."""

    ids: npt.NDArray[np.int32]  # (tokens,)
    targets: npt.NDArray[np.int32]  # (tokens,): the next token where it is learned, else -100
    starts: Indices  # (rows + 1,): where each row begins, and the end of the last
    documents: Indices  # (documents + 1,): where each document begins, and the end of the last

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Indices:
        """Tokens of each row."""
        return np.diff(self.starts)

    @property
    def learned_tokens(self) -> int:
        """Targets that count, in all rows."""
        return int(np.count_nonzero(self.targets != IGNORE_INDEX))

    @property
    def efficiency(self) -> float:
        """Share of tokens among all positions if every row were as long as the longest."""
        return len(self.ids) / (len(self) * int(self.lengths.max()))


def fit(
    documents: Sequence[Encoded], max_length: int, *, text: bool
) -> tuple[list[Encoded], list[str]]:
    """Makes every document at most ``max_length`` tokens long, with something to learn.

    Plain text that is too long becomes several documents, each of which begins with the last token
    of the one before, so that every token but the first is learned exactly once. Of other documents
    the right end goes, and with it the end-of-text token; if only the prompt stays, all of it.
    Notes say so.
    """
    fitted = []
    for ids, learned in documents:
        # Windows of max_length tokens that overlap by one.
        for start in range(0, max(len(ids) - 1, 1), max_length - 1) if text else (0,):
            part = slice(start, start + max_length)
            here = learned[part].copy()
            here[:1] = False
            if here.any():
                fitted.append(Encoded(ids[part], here))
    notes = []
    if long := sum(len(ids) > max_length for ids, _ in documents):
        done = "cut into several" if text else "cut at the right"
        notes.append(f"{long} documents of more than {max_length} tokens were {done}")
    if not text and (less := len(documents) - len(fitted)):
        notes.append(f"{less} documents left out: no token to learn within max_length")
    return fitted, notes


def pack(documents: Sequence[Encoded], max_length: int, *, packing: bool) -> Rows:
    """Lays documents into rows of at most ``max_length`` tokens, each once and whole."""
    lengths = [len(ids) for ids, _ in documents]
    alone = [[number] for number in range(len(documents))]
    shared = best_fit_decreasing(lengths, max_length) if packing else alone
    order = list(chain.from_iterable(shared))
    ids = np.concatenate([documents[number].ids for number in order])
    starts = np.cumsum([0, *(lengths[number] for number in order)], dtype=np.int64)
    # The first token of a document is never learned, so nothing is a target across a border.
    follows = np.flatnonzero(np.concatenate([documents[number].learned for number in order]))
    targets = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    targets[follows - 1] = ids[follows]
    return Rows(ids, targets, starts[np.cumsum([0, *map(len, shared)])], starts)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs lengths into bins: the longest first, each where it leaves the least room.

    ::

        for n in numbers, by length, longest first (ties: the smaller number first):
            bin = the bin with the least room that still holds lengths[n], else a new one
            (ties: the bin that came to this room last)

    These are at most 11/9 of the fewest bins possible, plus 4. Each length is at least 1 and at
    most ``capacity``.

    **Source:** Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional
    packing algorithms"; ``packing_strategy: bfd`` of TRL.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # sorted (room, -time it came to it, bin)
    for time, number in enumerate(sorted(range(len(lengths)), key=lambda n: -lengths[n])):
        at = bisect_left(rooms, (lengths[number],))
        if at == len(rooms):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, _, chosen = rooms.pop(at)
        bins[chosen].append(number)
        if left := room - lengths[number]:
            insort(rooms, (left, -time, chosen))
    return bins


def lm_batch(rows: Rows, indices: Sequence[int] | Indices, pad_id: int) -> LMBatch:
    """Builds the batch of some rows, padded on the right to the longest of them.

    Padding has no targets, so any ``pad_id`` will do. It is one more document: its positions too
    restart at 0.
    """
    numbers = np.asarray(indices, dtype=np.int64)
    lengths = rows.lengths[numbers]
    shape = (len(numbers), int(lengths.max(initial=0)))
    ids_BT = np.full(shape, pad_id, dtype=np.int64)
    targets_BT = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    positions_BT = np.empty(shape, dtype=np.int64)
    for b, (start, length) in enumerate(zip(rows.starts[numbers], lengths, strict=True)):
        stop = start + length
        ids_BT[b, :length] = rows.ids[start:stop]
        targets_BT[b, :length] = rows.targets[start:stop]
        first, last = np.searchsorted(rows.documents, (start, stop))
        begins = rows.documents[first : last + 1] - start  # of each document, then of the padding
        widths = np.diff(begins, append=shape[1])
        positions_BT[b] = np.arange(shape[1]) - np.repeat(begins, widths)
    return torch.from_numpy(ids_BT), torch.from_numpy(targets_BT), torch.from_numpy(positions_BT)
