"""Texts become token ids once, kept end to end in one array, and rows are padded when needed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.config import LabelledTexts
from halfstep.trainer.data.progress import ENCODE, Progress, no_progress

CHUNK_TEXTS = 1024
"""Texts a tokenizer gets at once: enough to keep its threads busy, little memory."""


class TextTokenizer(Protocol):
    """What encoding needs of a tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns each text into ids, with special tokens and not longer than the model allows."""


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
    tokenizer: TextTokenizer, labelled: LabelledTexts, progress: Progress = no_progress
) -> Examples:
    """Encodes every text in chunks, in order.

    Args:
        tokenizer: Gives ids of 0 to 2**31 - 1 with special tokens, already truncated.
        labelled: Texts and the numbers of their classes.
        progress: Told about every chunk, in UTF-8 bytes.

    Raises:
        DataError: A text has no token at all.
    """
    texts = labelled.texts
    total, done = sum(len(text.encode()) for text in texts), 0
    lengths = array("q", [0])
    ids = array("i")
    assert ids.itemsize == 4
    for first in range(0, len(texts), CHUNK_TEXTS):
        chunk = texts[first : first + CHUNK_TEXTS]
        rows = tokenizer.encode_batch(chunk)
        assert len(rows) == len(chunk)
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
        np.frombuffer(ids, dtype=np.int32) if ids else np.zeros(0, dtype=np.int32),
        np.cumsum(np.frombuffer(lengths, dtype=np.int64)),
        np.array(labelled.labels, dtype=np.int64),
    )


def padded(
    examples: Examples, indices: npt.NDArray[np.int64], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lays examples out as rows of one length, filled up on the right.

    Args:
        examples: Where to take them from.
        indices: (B,) numbers of examples, 0 to len(examples) - 1, in the order of the rows.
        pad_id: What to fill up with.

    Returns:
        (ids_BT int64, mask_BT bool, labels_B int64), T the longest of these examples; the mask is
        True at real tokens. B may be 0, then T is 0.
    """
    starts = examples.starts[indices]
    lengths = examples.starts[np.asarray(indices) + 1] - starts
    width = int(lengths.max(initial=0))
    mask = np.arange(width) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    # Row by row, left to right: the order in which a boolean mask takes its values.
    before = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    ids[mask] = examples.ids[places]
    return (
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        torch.from_numpy(examples.labels[indices].astype(np.int64)),
    )
