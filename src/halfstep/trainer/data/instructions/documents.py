"""Encoded documents in flat arrays, and what becomes of those that are too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfstep.errors import DataError
from halfstep.trainer.data.instructions.config import DROP, REFUSE


@dataclass(frozen=True, slots=True)
class Documents:
    """Encoded documents of any length, one behind the other."""

    ids: npt.NDArray[np.int32]
    """Shape (tokens,)."""
    learned: npt.NDArray[np.bool_]
    """Shape (tokens,); False at the first token of every document."""
    starts: npt.NDArray[np.int64]
    """Shape (documents + 1,): where each begins, and the end of the last."""
    places: tuple[str, ...]
    """``file:line`` of each."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.starts)

    def select(self, numbers: npt.NDArray[np.int64]) -> Documents:
        """Takes documents by number, in the order given."""
        tokens = spans(self.starts[numbers], self.lengths[numbers])
        return Documents(
            self.ids[tokens],
            self.learned[tokens],
            offsets(self.lengths[numbers]),
            tuple(self.places[number] for number in numbers),
        )


def fit(
    documents: Documents, max_length: int, drop_long: str, *, text: bool
) -> tuple[Documents, list[str]]:
    """Makes every document at most ``max_length`` tokens long, with something to learn.

    Plain text that is too long becomes several documents, each of which begins with the last token
    of the one before, so that every token but the first is learned exactly once. Of other documents
    the right end goes, and with it the end-of-text token; if only the prompt stays, all of it.

    Args:
        documents: What to fit.
        max_length: At least 2.
        drop_long: One of ``DROP_LONG``.
        text: Whether these are plain text.

    Returns:
        (documents, what happened to the others, one sentence each).

    Raises:
        DataError: A document is too long and ``drop_long`` is ``refuse``.
    """
    numbers, starts = np.arange(len(documents)), documents.starts[:-1]
    lengths = documents.lengths
    too_long = lengths > max_length
    count, notes = int(too_long.sum()), list[str]()
    if drop_long == REFUSE and count:
        first = int(np.argmax(too_long))
        raise DataError(
            f"{documents.places[first]}: {lengths[first]} tokens, more than max_length "
            f"{max_length} ({count} such in all, the longest has {lengths.max()}); raise "
            f"max_length, or set drop_long to truncate or drop"
        )
    if drop_long == DROP and count:
        notes.append(f"{count} documents of more than {max_length} tokens left out")
        numbers = np.flatnonzero(~too_long)
        starts, lengths = starts[numbers], lengths[numbers]
    elif text and count:
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
    return _with_something_to_learn(documents, numbers, starts, lengths, notes)


def _with_something_to_learn(
    documents: Documents,
    numbers: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    notes: list[str],
) -> tuple[Documents, list[str]]:
    """Takes spans of documents (number, start, length), but none without a learned token."""
    # A token's running count minus that of the span's first: the first is never learned.
    before = np.concatenate([[0], np.cumsum(documents.learned, dtype=np.int64)])
    learned = before[starts + lengths] - before[np.minimum(starts + 1, starts + lengths)]
    kept = learned > 0
    if not kept.all():
        count = int((~kept).sum())
        notes.append(f"{count} documents left out: no token to learn within max_length")
    tokens = spans(starts[kept], lengths[kept])
    fitted = Documents(
        documents.ids[tokens],
        documents.learned[tokens],
        offsets(lengths[kept]),
        tuple(documents.places[number] for number in numbers[kept]),
    )
    fitted.learned[fitted.starts[:-1]] = False
    return fitted, notes


def offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns where each of several lengths begins when they lie end to end, and the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def spans(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Lists the numbers starts[i] to starts[i] + lengths[i] - 1 of every i, in order."""
    ends = offsets(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
