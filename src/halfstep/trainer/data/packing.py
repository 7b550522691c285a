"""Packs encoded documents into rows: long documents are cut, and several may share a row.

A row holds documents end to end, so that few positions are padding. Position ids restart at 0 where
a document begins, by which a model tells documents apart, and no target crosses into the next one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.trainer.data.batches import IGNORED

Numbers: TypeAlias = npt.NDArray[np.int64]
LMBatch = tuple[Tensor, Tensor, Tensor]
"""(ids_BT, targets_BT, positions_BT), int64."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Encoded documents of any length, concatenated in flat arrays."""

    ids: npt.NDArray[np.int32]
    """Shape (tokens,)."""
    learned: npt.NDArray[np.bool_]
    """Shape (tokens,); False at the first token of every document."""
    starts: Numbers
    """Shape (documents + 1,): where each begins, and the end of the last."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Numbers:
        """Tokens of each document."""
        return np.diff(self.starts)

    def select(
        self, numbers: Numbers, starts: Numbers | None = None, lengths: Numbers | None = None
    ) -> Documents:
        """Takes documents, or the given spans of them, by number, in the order given."""
        starts = self.starts[numbers] if starts is None else starts
        lengths = self.lengths[numbers] if lengths is None else lengths
        tokens = spans(starts, lengths)
        return Documents(self.ids[tokens], self.learned[tokens], offsets(lengths))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or several documents, in flat arrays."""

    ids: npt.NDArray[np.int32]
    """Shape (tokens,)."""
    targets: npt.NDArray[np.int32]
    """Shape (tokens,): the next token where that is to be learned, else ``IGNORED``."""
    starts: Numbers
    """Shape (rows + 1,): where each row begins, and the end of the last."""
    documents: Numbers
    """Shape (documents + 1,): where each document begins, and the end of the last."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Numbers:
        """Tokens of each row."""
        return np.diff(self.starts)

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return len(self.ids)

    @property
    def learned_tokens(self) -> int:
        """Targets that count, in all rows."""
        return int(np.count_nonzero(self.targets != IGNORED))

    @property
    def efficiency(self) -> float:
        """Share of tokens among all positions if every row were as long as the longest."""
        return self.tokens / (len(self) * int(self.lengths.max())) if len(self) else 1.0


def fit(documents: Documents, max_length: int, *, text: bool) -> tuple[Documents, list[str]]:
    """Makes every document at most ``max_length`` tokens long, with something to learn.

    Plain text that is too long becomes several documents, each of which begins with the last token
    of the one before, so that every token but the first is learned exactly once. Of other documents
    the right end goes, and with it the end-of-text token; if only the prompt stays, all of it.

    Returns:
        (documents, what happened to the others, one sentence each).
    """
    numbers, starts = np.arange(len(documents)), documents.starts[:-1]
    lengths = documents.lengths
    too_long = lengths > max_length
    count, notes = int(too_long.sum()), list[str]()
    if text and count:
        # Windows of max_length tokens that overlap by one.
        windows = np.maximum(-(-(lengths - 1) // (max_length - 1)), 1)
        notes.append(
            f"{count} texts cut into {windows[too_long].sum()} documents of at most {max_length} "
            f"tokens"
        )
        numbers = np.repeat(numbers, windows)
        inside = spans(np.zeros_like(windows), windows)
        starts = starts[numbers] + inside * (max_length - 1)
        lengths = np.minimum(documents.starts[1:][numbers] - starts, max_length)
    elif count:
        lost = int((lengths - max_length)[too_long].sum())
        notes.append(f"{count} documents cut to {max_length} tokens, {lost} tokens left out")
        lengths = np.minimum(lengths, max_length)
    # A token's running count minus that of the span's first: the first is never learned.
    before = np.concatenate([[0], np.cumsum(documents.learned, dtype=np.int64)])
    learned = before[starts + lengths] - before[np.minimum(starts + 1, starts + lengths)]
    kept = learned > 0
    if not kept.all():
        count = int((~kept).sum())
        notes.append(f"{count} documents left out: no token to learn within max_length")
    fitted = documents.select(numbers[kept], starts[kept], lengths[kept])
    fitted.learned[fitted.starts[:-1]] = False
    return fitted, notes


def offsets(lengths: Numbers) -> Numbers:
    """Returns where each of several lengths begins when they lie end to end, and the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def spans(starts: Numbers, lengths: Numbers) -> Numbers:
    """Lists the numbers starts[i] to starts[i] + lengths[i] - 1 of every i, in order."""
    ends = offsets(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)


def pack(documents: Documents, max_length: int, *, packing: bool) -> Rows:
    """Lays documents of at most ``max_length`` tokens into rows that hold each once, whole.

    With ``packing`` they share rows; otherwise each document is a row of its own.
    """
    starts = documents.starts
    if packing:
        shared = best_fit_decreasing(documents.lengths.tolist(), max_length)
        documents = documents.select(np.array([n for row in shared for n in row], dtype=np.int64))
        starts = documents.starts[offsets(np.array([len(row) for row in shared], dtype=np.int64))]
    targets = np.full(len(documents.ids), IGNORED, dtype=np.int32)
    # The first token of a document is never learned, so nothing is a target across a border.
    follows = np.flatnonzero(documents.learned)
    targets[follows - 1] = documents.ids[follows]
    return Rows(documents.ids, targets, starts, documents.starts)


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
    with_room: dict[int, list[int]] = {}  # room -> bins, the last to come to it at the end
    rooms: list[int] = []  # keys of with_room, sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(number)
        left = room - length
        if left > 0:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(chosen)
    return bins


def lm_batch(rows: Rows, indices: Sequence[int] | Numbers, pad_id: int) -> LMBatch:
    """Builds the batch of some rows, padded on the right to the longest of them.

    Targets of padding are ``IGNORED``, so any ``pad_id`` will do. Padding is one more document: its
    positions too restart at 0.
    """
    numbers = np.asarray(indices, dtype=np.int64)
    lengths = rows.lengths[numbers]
    shape = (len(numbers), int(lengths.max()) if len(numbers) else 0)
    ids_BT = np.full(shape, pad_id, dtype=np.int64)
    targets_BT = np.full(shape, IGNORED, dtype=np.int64)
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
