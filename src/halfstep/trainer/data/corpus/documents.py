"""Turns spans of files into documents, documents into pieces, and pieces into one stream of ids.

A text file is one document, a line of a ``.jsonl`` file is one document (its ``text``). Everything
is read strictly as UTF-8: a byte order mark at the start of a file is dropped, and line ends stay
as they are. Text of any length becomes pieces that fit in memory and join to exactly that text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.token_file import Encoded
from halfstep.trainer.data.progress import ENCODE, TRAIN_TOKENIZER, Progress, no_progress
from halfstep.trainer.data.records import BYTE_ORDER_MARK, is_text, parse_objects, read_lines
from halfstep.trainer.data.sources import CHUNK_BYTES, Source, read_chunks
from halfstep.trainer.data.tokenizer import Ids, Tokenizer

Item = TypeVar("Item")

PIECE_BYTES = 1 << 18
"""Size of a piece: a batch of several keeps all cores busy; one piece's tokens take some 10 MB."""
BATCH_BYTES = 4 << 20
"""Amount of text encoded at once. The tokenizers library needs about 100 bytes per token, so 4 MiB
of text take some 150 MB of memory while they are encoded."""
SAMPLE_BYTES = 64 << 20
"""Limit of the text that a tokenizer is trained on, which bounds the memory; 8,192 merges need far
less."""
WINDOW_BYTES = 1 << 16
"""Distance from the exact position of a split within which a newline, else a blank, is sought."""


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes ``start`` to ``stop`` of a file; of a ``.jsonl`` file always whole lines."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of one document, never empty."""

    text: str
    text_bytes: int
    """UTF-8 bytes of ``text``."""
    source_bytes: int
    """Bytes of the input file that the piece consumes, for progress."""
    begins: bool
    """Whether a document starts here."""


def whole(sources: Iterable[Source]) -> tuple[Span, ...]:
    """Makes spans that cover every file completely."""
    return tuple(Span(source, 0, source.size) for source in sources)


def read_pieces(spans: Iterable[Span], size: int = PIECE_BYTES) -> Iterator[TextPiece]:
    """Yields all documents of text and ``.jsonl`` spans in order, piece by piece.

    Empty documents yield none; ``size`` bytes, at least 4, are the largest length of a piece.

    Raises:
        DataError: A byte is not UTF-8, a line is not a JSON object with a string ``text``, or a
            file cannot be read. The message names the file and the offset or the line.
    """
    for span in spans:
        yield from (_records if span.source.kind == "jsonl" else _text)(span, size)


def _text(span: Span, size: int) -> Iterator[TextPiece]:
    offset, begins = span.start, True
    for raw in split_pieces(read_chunks(span.source, span.start, span.stop), size):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{span.source.path}: not UTF-8: byte 0x{raw[error.start]:02x} at byte offset "
                f"{offset + error.start}; convert the file to UTF-8, such as by: iconv -f GBK -t "
                "UTF-8 OLD > NEW, or leave it out"
            ) from None
        if offset == 0 and text.startswith("%PDF-"):  # whose bytes may all be ASCII
            raise DataError(
                f"{span.source.path} is a PDF, whose bytes are no text; take the text out of it, "
                "such as by: pdftotext FILE.pdf FILE.txt"
            )
        skipped = 0
        if offset == 0 and text.startswith("\ufeff"):
            text, skipped = text[1:], len(BYTE_ORDER_MARK)
        offset += len(raw)
        if text:
            yield TextPiece(text, len(raw) - skipped, len(raw), begins)
            begins = False


def _records(span: Span, size: int) -> Iterator[TextPiece]:
    path = span.source.path
    for line in read_lines(path, span.start, span.stop):
        consumed = len(line[1].encode("utf-8"))
        for place, record in parse_objects([line], path):
            begins = True
            for raw in split_pieces([_record_text(record, place)], size):
                yield TextPiece(raw.decode("utf-8"), len(raw), consumed, begins)
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


def split_pieces(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cuts a stream of UTF-8 bytes into pieces of at most ``size`` bytes, of whole characters.

    A cut falls after the last newline that fits, else before the last blank, else between two
    characters. Where it falls depends on the text and the piece size alone, never on how the bytes
    arrived, so the tokens of a file are the same on every machine. Bytes that are not UTF-8 are cut
    anywhere; decoding the piece then raises the error.
    """
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
    return blank if blank > start else character_start(data, stop)


def character_start(data: bytes, index: int) -> int:
    """Moves an index back to the start of the UTF-8 character it falls into, if there is one.

    ``index`` itself is returned where no start lies within 3 bytes, which is not UTF-8.
    """
    for back in range(min(4, index + 1)):
        if data[index - back] & 0b1100_0000 != 0b1000_0000:
            return index - back
    return index


# Splitting a corpus without validation files: the tail of its bytes becomes validation.


def split_corpus(
    sources: tuple[Source, ...], fraction: float
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Cuts a corpus near its last ``fraction`` of bytes, in document order.

    The file in which the place falls is cut too: a text file at the next newline (else the one
    before, else a blank, else between two characters), a ``.jsonl`` file at the start of the line,
    so that its records stay whole. The two parts together hold every byte once, in order; DataError
    if one of them would be empty.
    """
    total = sum(source.size for source in sources)
    place = total - held_out(total, fraction)
    index = 0
    while place >= sources[index].size:
        place -= sources[index].size
        index += 1
    source = sources[index]
    if source.kind == "jsonl":
        cut = _line_start(source, place)
        if index == 0 and cut == 0:  # the place falls into the first record of all: train keeps it
            cut = _line_end(source, place)
    else:
        cut = _text_cut(source, place, may_be_start=index > 0)
    # A cut at the border of a file leaves an empty span on one side of it.
    train = (*whole(sources[:index]), *([Span(source, 0, cut)] if cut else []))
    rest = [Span(source, cut, source.size)] if cut < source.size else []
    validation = (*rest, *whole(sources[index + 1 :]))
    if not train or not validation:
        raise too_small([source.path for source in sources], total)
    return train, validation


def held_out(total: int, fraction: float) -> int:
    """Rounds a share of ``total`` units so that, of at least two, neither part is empty."""
    return max(1, min(round(total * fraction), total - 1))


def too_small(paths: list[Path], total: int) -> DataError:
    """Makes the error for a corpus that is too small to be split, for the caller to raise."""
    return DataError(
        f"{paths[0]}{' and others' if paths[1:] else ''}: {total} bytes in too few documents to "
        f"hold some out for validation; add text or give data.validation"
    )


def _text_cut(source: Source, place: int, *, may_be_start: bool) -> int:
    if place == 0 and may_be_start:
        return 0
    low, high = max(0, place - WINDOW_BYTES), min(source.size, place + WINDOW_BYTES)
    data = b"".join(read_chunks(source, low, high))
    at = place - low
    # rfind and find give -1 for "none". A newline is cut after, a blank before (see _cut).
    candidates = (
        data.find(b"\n", max(at - 1, 0)) + 1,
        data.rfind(b"\n", 0, at) + 1,
        max(data.find(b" ", at), 0),
        max(data.rfind(b" ", 0, at), 0),
        character_start(data, at),
        next((i for i in range(at, len(data)) if character_start(data, i) == i), 0),
    )
    for cut in candidates:
        if cut > 0 and low + cut < source.size:
            return low + cut
    return 0 if may_be_start else source.size


def _line_start(source: Source, place: int) -> int:
    while place > 0:
        low = max(0, place - CHUNK_BYTES)
        newline = b"".join(read_chunks(source, low, place)).rfind(b"\n")
        if newline >= 0:
            return low + newline + 1
        place = low
    return 0


def _line_end(source: Source, place: int) -> int:
    for chunk in read_chunks(source, place, source.size):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return place + newline + 1
        place += len(chunk)
    return source.size


def sample_pieces(
    pieces: Iterable[TextPiece], total: int, progress: Progress = no_progress
) -> Iterator[str]:
    """Yields evenly spread pieces of at most ``SAMPLE_BYTES`` together, to train a tokenizer on.

    ``credit`` grows with every byte read, at the rate SAMPLE_BYTES / total; a piece is taken when
    there is credit for all of it (Bresenham's line, in bytes). No piece is longer than the input it
    uses up, so a corpus within the limit is taken whole.
    """
    done, credit = 0, 0
    for piece in pieces:
        done += piece.source_bytes
        credit += piece.source_bytes * SAMPLE_BYTES
        if credit >= piece.text_bytes * total:
            credit -= piece.text_bytes * total
            yield piece.text
        progress(TRAIN_TOKENIZER, done, total)


def encode_pieces(
    pieces: Iterable[TextPiece], tokenizer: Tokenizer, total: int, progress: Progress = no_progress
) -> Iterator[Encoded]:
    """Encodes documents batch by batch, with a separator between two of them.

    The tokenizer's end-of-text id, else its ids of a newline, are the separator. ``total`` is what
    ``pieces`` uses up of the input in all, in bytes.
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
