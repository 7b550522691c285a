"""A corpus without validation files is cut once: the tail of its bytes becomes validation."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.documents import Span, character_start, whole
from halfstep.trainer.data.sources import CHUNK_BYTES, Source, read_chunks

WINDOW_BYTES = 1 << 16
"""How far from the exact place a newline, else a blank, is looked for."""


def split(
    sources: tuple[Source, ...], fraction: float
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Cuts a corpus near its last ``fraction`` of bytes, in document order.

    The file in which the place falls is cut too: a text file at the next newline (else the one
    before, else a blank, else between two characters), a ``.jsonl`` file at the start of the line,
    so that its records stay whole.

    Returns:
        (train, validation), which together hold every byte once, in order.

    Raises:
        DataError: One of the two would be empty.
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
    train = (*whole(sources[:index]), Span(source, 0, cut))
    validation = (Span(source, cut, source.size), *whole(sources[index + 1 :]))
    parts = tuple(
        tuple(span for span in part if span.stop > span.start) for part in (train, validation)
    )
    if not all(parts):
        raise too_small([source.path for source in sources], total)
    return parts[0], parts[1]


def held_out(total: int, fraction: float) -> int:
    """Rounds a share of ``total`` units so that, of at least two, neither part is empty."""
    return max(1, min(round(total * fraction), total - 1))


def too_small(paths: list[Path], total: int) -> DataError:
    """Words that a corpus has no two parts; returns the error for the caller to raise."""
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
    # rfind and find give -1 for "none". A newline is cut after, a blank before (see pieces.py).
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
