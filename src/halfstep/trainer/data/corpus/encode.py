"""Documents become one stream of ids, batch by batch, with a separator between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from halfstep.trainer.data.corpus.documents import Piece
from halfstep.trainer.data.corpus.token_file import Encoded
from halfstep.trainer.data.progress import ENCODE, Progress, no_progress
from halfstep.trainer.data.tokenizers.tokenizer import Ids, Tokenizer

BATCH_BYTES = 4 << 20
"""Text encoded at once. The library's own record of a token is about 100 bytes, so 4 MiB of text
cost some 150 MB of memory while they are encoded."""


def encode(
    pieces: Iterable[Piece], tokenizer: Tokenizer, total: int, progress: Progress = no_progress
) -> Iterator[Encoded]:
    """Encodes documents batch by batch, with a separator between two of them.

    Args:
        pieces: The documents.
        tokenizer: Its end-of-text id, else its ids of a newline, are the separator.
        total: Bytes of input that ``pieces`` uses up in all.
        progress: Told after each batch.

    Yields:
        The ids of each batch.
    """
    end = tokenizer.end_of_text
    ids = tokenizer.encode("\n") if end is None else [end]
    separator, separator_bytes = np.array(ids, dtype=np.uint32), 1 if end is None else 0
    done, first = 0, True
    for batch in _batches(pieces):
        parts: list[Ids] = []
        text_bytes = 0
        for piece, encoded in zip(
            batch, tokenizer.encode_arrays([piece.text for piece in batch]), strict=True
        ):
            if piece.begins and not first:
                parts.append(separator)
                text_bytes += separator_bytes
            first = False
            parts.append(encoded)
            text_bytes += piece.text_bytes
            done += piece.source_bytes
        yield Encoded(np.concatenate(parts), text_bytes, done)
        progress(ENCODE, done, total)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.text_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
