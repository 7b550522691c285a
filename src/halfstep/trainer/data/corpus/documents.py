"""Spans of files become documents, their pieces, and at last one stream of ids.

A text file is one document, a line of a ``.jsonl`` file is one document (its ``text``). Everything
is read strictly as UTF-8: a byte order mark at the start of a file is dropped, and line ends stay
as they are. Text of any length becomes pieces that fit in memory and join to exactly that text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.token_file import Encoded
from halfstep.trainer.data.progress import ENCODE, Progress, no_progress
from halfstep.trainer.data.records import BYTE_ORDER_MARK, is_text, parse_objects, read_lines
from halfstep.trainer.data.sources import Source, read_chunks
from halfstep.trainer.data.tokenizers.tokenizer import Ids, Tokenizer

Item = TypeVar("Item")

PIECE_BYTES = 1 << 18
"""256 KiB: a batch of several keeps every core busy, and the tokens of one take some 10 MB."""

MIN_PIECE_BYTES = 4
"""The longest UTF-8 character; smaller pieces could not hold it."""

BATCH_BYTES = 4 << 20
"""Text encoded at once. The library's own record of a token is about 100 bytes, so 4 MiB of text
cost some 150 MB of memory while they are encoded."""


def split_pieces(chunks: Iterable[bytes], size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Cuts a stream of UTF-8 bytes into pieces that each hold whole characters.

    A cut falls after the last newline that fits, else before the last blank, else between two
    characters. Where it falls depends on the text and the piece size alone, never on how the bytes
    arrived, so the tokens of a file are the same on every machine.

    Args:
        chunks: The bytes, in chunks of any length.
        size: Largest length of a piece in bytes, at least 4.

    Yields:
        Non-empty pieces of at most ``size`` bytes whose concatenation is the input. Bytes that
        are not UTF-8 are cut anywhere; whoever decodes the piece meets them.
    """
    if size < MIN_PIECE_BYTES:
        raise ValueError(f"size must be at least {MIN_PIECE_BYTES} bytes, got {size}")
    held = b""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > size:
            cut = _cut(held, start, start + size)
            yield held[start:cut]
            start = cut
        held = held[start:]
    if held:
        yield held


def _cut(data: bytes, start: int, stop: int) -> int:
    """Finds where the piece that begins at ``start`` ends: start < cut <= stop < len(data)."""
    newline = data.rfind(b"\n", start, stop)
    if newline >= 0:
        return newline + 1
    # Before the blank, not after it: GPT-2 style tokenizers join a blank to the word it precedes.
    blank = max(data.rfind(b" ", start, stop), data.rfind(b"\t", start, stop))
    if blank > start:
        return blank
    return character_start(data, stop)


def character_start(data: bytes, index: int) -> int:
    """Moves an index back to the start of the UTF-8 character it falls into, if there is one.

    Args:
        data: UTF-8 bytes.
        index: 0 <= index < len(data).

    Returns:
        The start; ``index`` itself where no start lies within 3 bytes, which is not UTF-8.
    """
    for back in range(min(MIN_PIECE_BYTES, index + 1)):
        if data[index - back] & 0b1100_0000 != 0b1000_0000:
            return index - back
    return index


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes ``start`` to ``stop`` of a file; of a ``.jsonl`` file always whole lines."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one document, never empty."""

    text: str
    text_bytes: int
    """UTF-8 bytes of ``text``."""
    source_bytes: int
    """Bytes of the input used up by it, for progress."""
    begins: bool
    """Whether a document starts here."""


def whole(sources: Iterable[Source]) -> tuple[Span, ...]:
    """Takes every byte of every file."""
    return tuple(Span(source, 0, source.size) for source in sources)


def read_pieces(spans: Iterable[Span], size: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yields all documents of the spans in order, piece by piece.

    Args:
        spans: Text and ``.jsonl`` spans, not token files.
        size: Largest length of a piece in bytes, at least 4.

    Yields:
        Pieces. Empty documents yield none.

    Raises:
        DataError: A byte is not UTF-8, a line is not a JSON object with a string ``text``, or a
            file cannot be read. The message names the file and the offset or the line.
    """
    for span in spans:
        yield from (_records if span.source.kind == "jsonl" else _text)(span, size)


def _text(span: Span, size: int) -> Iterator[Piece]:
    offset, begins = span.start, True
    for raw in split_pieces(read_chunks(span.source, span.start, span.stop), size):
        text = _decode(raw, span.source, offset)
        skipped = 0
        if offset == 0 and text.startswith("\ufeff"):
            text, skipped = text[1:], len(BYTE_ORDER_MARK)
        offset += len(raw)
        if text:
            yield Piece(text, len(raw) - skipped, len(raw), begins)
            begins = False


def _records(span: Span, size: int) -> Iterator[Piece]:
    path = span.source.path
    for line in read_lines(path, span.start, span.stop):
        consumed = len(line[1].encode("utf-8"))
        for place, record in parse_objects([line], path):
            begins = True
            for raw in split_pieces([_record_text(record, place)], size):
                yield Piece(raw.decode("utf-8"), len(raw), consumed, begins)
                consumed, begins = 0, False


def _record_text(record: dict[str, Any], place: str) -> bytes:
    """Takes the ``text`` out of one record, as UTF-8."""
    if "text" not in record:
        keys = ", ".join(sorted(record)[:5]) or "none"
        raise DataError(f'{place}: no field "text" (fields here: {keys}); rename one')
    text = record["text"]
    if not isinstance(text, str):
        raise DataError(f'{place}: "text" must be a string, got {type(text).__name__}')
    if not is_text(text):
        raise DataError(f'{place}: "text" holds half a surrogate pair; mend it')
    return text.encode("utf-8")


def _decode(raw: bytes, source: Source, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{source.path}: not UTF-8: byte 0x{raw[error.start]:02x} at byte offset {at}; "
            f"convert the file to UTF-8 or leave it out"
        ) from None


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
    for batch in in_batches(pieces, lambda piece: piece.text_bytes):
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


def in_batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups items until their sizes reach ``BATCH_BYTES``; the last group may be smaller."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
