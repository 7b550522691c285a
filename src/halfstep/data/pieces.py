"""Text of any length becomes pieces that fit in memory, and the pieces join to exactly that text.

A cut falls after the last newline that fits, else before the last blank, else between two
characters. Where the cuts fall depends on the text and the piece size alone, never on how the bytes
arrived, so the tokens of a file are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
