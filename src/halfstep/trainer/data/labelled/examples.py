"""Encodes texts once into one flat array of token ids, and pads rows of a batch when needed."""

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
    """The interface of a tokenizer that encoding needs."""

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
    """Encodes every text in chunks, in order; ``progress`` is told in UTF-8 bytes.

    Raises:
        DataError: A text has no token at all.
    """
    texts = labelled.texts
    total, done = sum(len(text.encode()) for text in texts), 0
    lengths, ids = array("q", [0]), array("i")
    for first in range(0, len(texts), CHUNK_TEXTS):
        chunk = texts[first : first + CHUNK_TEXTS]
        rows = tokenizer.encode_batch(chunk)
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
