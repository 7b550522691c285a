"""Spans of files become documents, and documents come in pieces that fit in memory.

A text file is one document, a line of a ``.jsonl`` file is one document (its ``text``). Everything
is read strictly as UTF-8: a byte order mark at the start of a file is dropped, line ends stay as
they are, and a byte that is not UTF-8 is an error with its offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from halfstep.errors import DataError
from halfstep.trainer.data.sources import Source, read_chunks, unreadable

# Text of any length becomes pieces that fit in memory, and the pieces join to exactly that text.
#
# A cut falls after the last newline that fits, else before the last blank, else between two
# characters. Where the cuts fall depends on the text and the piece size alone, never on how the
# bytes arrived, so the tokens of a file are the same on every machine.


PIECE_BYTES = 1 << 18
"""256 KiB: a batch of several keeps every core busy, and the tokens of one take some 10 MB."""

MIN_PIECE_BYTES = 4
"""The longest UTF-8 character; smaller pieces could not hold it."""


def split_pieces(chunks: Iterable[bytes], size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Cuts a stream of UTF-8 bytes into pieces that each hold whole characters.

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


BYTE_ORDER_MARK = b"\xef\xbb\xbf"

MAX_RECORD_BYTES = 64 << 20
"""Longest line of a ``.jsonl`` file. JSON cannot be parsed in pieces, so memory needs a limit."""


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
    for offset, line in _lines(span):
        consumed, begins = len(line), True
        for raw in split_pieces([_record_text(line, span.source, offset)], size):
            yield Piece(raw.decode("utf-8"), len(raw), consumed, begins)
            consumed, begins = 0, False


def _lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Yields (offset in the file, line with its end); only a line feed ends a line.

    **Source:** https://jsonlines.org, "Line Terminator".
    """
    source, offset = span.source, span.start
    try:
        with open(source.path, "rb") as file:
            file.seek(offset)
            while offset < span.stop:
                line = file.readline(MAX_RECORD_BYTES + 1)
                if len(line) > MAX_RECORD_BYTES:
                    raise _bad_line(
                        source,
                        offset,
                        f"longer than {MAX_RECORD_BYTES} bytes; split the record into several",
                    )
                if not line:
                    raise _bad_line(source, offset, "the file ended while it was read")
                yield offset, line
                offset += len(line)
    except OSError as error:
        raise unreadable(source.path, error) from None


def _record_text(line: bytes, source: Source, offset: int) -> bytes:
    """Takes the ``text`` out of one line, as UTF-8; blank lines give the empty text."""
    content = line.removeprefix(BYTE_ORDER_MARK) if offset == 0 else line
    string = _decode(content, source, offset + len(line) - len(content))
    if not string.strip():
        return b""
    try:
        record = json.loads(string)
    except json.JSONDecodeError as error:
        raise _bad_line(
            source,
            offset,
            f"not JSON: {error.msg} at column {error.colno}; write one object a line",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, [[[[[...
        raise _bad_line(source, offset, f"not usable JSON: {error}") from None
    if not isinstance(record, dict):
        found = f"a JSON {type(record).__name__}, not an object"
        raise _bad_line(source, offset, f'{found}; write {{"text": "..."}} on every line')
    if "text" not in record:
        keys = ", ".join(sorted(record)[:5]) or "none"
        raise _bad_line(source, offset, f'no field "text" (fields here: {keys}); rename one')
    text = record["text"]
    if not isinstance(text, str):
        raise _bad_line(source, offset, f'"text" must be a string, got {type(text).__name__}')
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        why = '"text" holds half a surrogate pair (\\ud800 to \\udfff); remove it'
        raise _bad_line(source, offset, why) from None


def _decode(raw: bytes, source: Source, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{source.path}: not UTF-8: byte 0x{raw[error.start]:02x} at byte offset {at}; "
            f"convert the file to UTF-8 or leave it out"
        ) from None


def _bad_line(source: Source, offset: int, why: str) -> DataError:
    # Counted only now: a span may start in the middle of the file, and errors are rare.
    number = 1 + sum(chunk.count(b"\n") for chunk in read_chunks(source, 0, offset))
    return DataError(f"{source.path}:{number}: {why}")
