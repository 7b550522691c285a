"""nanoGPT's ``.bin`` files are used where they lie: raw little-endian uint16, no header, no copy.

**Source:** nanoGPT ``data/openwebtext/prepare.py``, which writes them, and ``train.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from halfstep.data.progress import CHECK, Progress, no_progress
from halfstep.data.sources import Source, read_chunks
from halfstep.data.split import held_out, too_small
from halfstep.data.token_file import TokenFile
from halfstep.data.tokenizer import Tokenizer
from halfstep.errors import DataError

ITEM_BYTES = 2
"""Bytes of a token."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The tokens ``start`` to ``stop`` of a ``.bin`` file."""

    source: Source
    start: int
    stop: int


def whole_file(sources: tuple[Source, ...], field: str) -> TokenSpan:
    """Takes every token of the one ``.bin`` file.

    Args:
        sources: The files given; more than one could not be used without a copy.
        field: Name for messages, ``data.train`` or ``data.validation``.

    Raises:
        DataError: There is more than one file, or it does not hold whole tokens.
    """
    if len(sources) > 1:
        raise DataError(
            f"{field} names {len(sources)} .bin files ({sources[0].path}, {sources[1].path}, ...), "
            f"but one is used in place; name one each for data.train and data.validation, or join "
            f"the shards with cat"
        )
    source = sources[0]
    if source.size % ITEM_BYTES:
        raise DataError(
            f"{source.path}: {source.size} bytes are not a whole number of uint16 tokens (2 bytes "
            f"each); the file is cut short or no nanoGPT .bin file: write it again"
        )
    return TokenSpan(source, 0, source.size // ITEM_BYTES)


def split_file(span: TokenSpan, fraction: float) -> tuple[TokenSpan, TokenSpan]:
    """Cuts the tokens into train and the last ``fraction``, validation.

    Raises:
        DataError: One of the two would be empty.
    """
    cut = span.stop - held_out(span.stop - span.start, fraction)
    if cut <= span.start:
        raise too_small([span.source.path], span.source.size)
    return (
        TokenSpan(span.source, span.start, cut),
        TokenSpan(span.source, cut, span.stop),
    )


def check_ids(span: TokenSpan, tokenizer: Tokenizer, progress: Progress = no_progress) -> TokenFile:
    """Reads every token once and makes sure that the tokenizer knows it.

    Args:
        span: The tokens to use.
        tokenizer: The tokenizer that wrote them, as far as the user knows.
        progress: Told about every chunk.

    Returns:
        A view of the file. ``text_bytes`` is exact where the tokenizer knows the bytes of each id.

    Raises:
        DataError: An id is outside the vocabulary, or the file cannot be read.
    """
    source, vocab_size = span.source, tokenizer.vocab_size
    lengths = tokenizer.token_bytes
    digest = hashlib.sha256()
    position, text_bytes, held = span.start, 0, b""
    for chunk in read_chunks(source, span.start * ITEM_BYTES, span.stop * ITEM_BYTES):
        digest.update(chunk)
        raw = held + chunk  # a short read may end within a token
        held = raw[len(raw) - len(raw) % ITEM_BYTES :]
        ids = np.frombuffer(raw, dtype="<u2", count=len(raw) // ITEM_BYTES)
        bad = np.flatnonzero(ids >= vocab_size)
        if len(bad):
            raise DataError(
                f"{source.path}: token {ids[bad[0]]} at offset {position + bad[0]} (byte "
                f"{(position + bad[0]) * ITEM_BYTES}) is outside the vocabulary of {vocab_size} "
                f"ids; give the tokenizer that wrote the file as data.tokenizer"
            )
        if lengths is not None:
            text_bytes += int(lengths[ids].sum())
        position += len(ids)
        progress(CHECK, (position - span.start) * ITEM_BYTES, (span.stop - span.start) * ITEM_BYTES)
    return TokenFile(
        path=source.path,
        dtype="uint16",
        offset=span.start,
        count=span.stop - span.start,
        text_bytes=None if lengths is None else text_bytes,
        vocab_size=vocab_size,
        sha256=digest.hexdigest(),
    )
