"""Turns a corpus of text into two token files once, and later finds them in a cache.

::

    list files -> hash contents -> split -> tokenizer (loaded, cached, or trained on train only)
    -> each part: cached token file, or encode into the cache

A text file is one document, a line of a ``.jsonl`` file is one document (its ``text``). Nothing is
ever loaded whole: text passes in pieces that fit in memory and join to exactly that text.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from halfstep.errors import DataError
from halfstep.trainer.data.config import DataConfig, bpe_size
from halfstep.trainer.data.records import (
    BYTE_ORDER_MARK,
    Source,
    check_unchanged,
    content_sha256,
    find_sources,
    inspect_file,
    is_text,
    parse_objects,
    read_chunks,
    read_lines,
    unreadable,
)
from halfstep.trainer.data.token_file import (
    ENCODE,
    TRAIN_TOKENIZER,
    Encoded,
    Progress,
    TokenFile,
    cache_root,
    fetch,
    load_tokens,
    no_progress,
    write_tokens,
)
from halfstep.trainer.data.tokenizer import (
    MIN_FREQUENCY,
    ByteTokenizer,
    Ids,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

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
"""Distance from the exact position of a split within which a newline is sought."""


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
    before, else between two characters), a ``.jsonl`` file at the start of the line, so that its
    records stay whole. The two parts together hold every byte once, in order; DataError
    if one of them would be empty.
    """
    total = sum(source.size for source in sources)
    place = total - held_out(total, fraction)
    index = 0
    while place >= sources[index].size:
        place -= sources[index].size
        index += 1
    source = sources[index]
    find_cut = _line_cut if source.kind == "jsonl" else _text_cut
    cut = find_cut(source, place, may_be_start=index > 0)  # of the first file, train keeps a part
    # A cut at the border of a file leaves an empty span on one side of it.
    train = (*whole(sources[:index]), *([Span(source, 0, cut)] if cut else []))
    rest = [Span(source, cut, source.size)] if cut < source.size else []
    validation = (*rest, *whole(sources[index + 1 :]))
    if not train or not validation:
        raise DataError(
            f"{sources[0].path}{' and others' if sources[1:] else ''}: {total} bytes in too few "
            f"documents to hold some out for validation; add text or give data.validation"
        )
    return train, validation


def held_out(total: int, fraction: float) -> int:
    """Rounds a share of ``total`` units so that, of at least two, neither part is empty."""
    return max(1, min(round(total * fraction), total - 1))


def _text_cut(source: Source, place: int, *, may_be_start: bool) -> int:
    """Finds the newline after a place, else the one before, else the start of a character."""
    if place == 0 and may_be_start:
        return 0
    low, high = max(0, place - WINDOW_BYTES), min(source.size, place + WINDOW_BYTES)
    data = b"".join(read_chunks(source, low, high))
    at = place - low
    newlines = (data.find(b"\n", max(at - 1, 0)) + 1, data.rfind(b"\n", 0, at) + 1)
    for cut in (*newlines, character_start(data, at)):
        if cut > 0 and low + cut < source.size:
            return low + cut
    return 0 if may_be_start else source.size


def _line_cut(source: Source, place: int, *, may_be_start: bool) -> int:
    """Finds the start of the line that holds a place; of the file's first line, perhaps its end."""
    cut = done = 0
    for chunk in read_chunks(source, 0, place):
        cut = max(cut, done + chunk.rfind(b"\n") + 1) if b"\n" in chunk else cut
        done += len(chunk)
    if cut or may_be_start:
        return cut
    for chunk in read_chunks(source, place, source.size):
        if b"\n" in chunk:
            return done + chunk.find(b"\n") + 1
        done += len(chunk)
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
        yield Encoded(np.concatenate(parts), text_bytes)
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


FORMAT_VERSION = 1
"""Part of every cache name; increase it when the same input would give different files."""
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
"""Folders of tests (many are deliberately not UTF-8), of installed packages, and of wheels."""


def standard_library(folder: Path | None = None) -> tuple[Source, ...]:
    """Lists the ``.py`` files of the standard library, a corpus that every user already has.

    They are sorted by the SHA-256 of their relative paths, which is a fixed order and makes the
    tail that becomes validation a fair sample of the library, not its letters x to z. Empty files
    and those that are not UTF-8 are left out. ``folder`` is where to look, by default in the
    running Python.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    ranked = {
        hashlib.sha256(name.as_posix().encode("utf-8", "surrogateescape")).digest(): folder / name
        for name in (path.relative_to(folder) for path in folder.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(name.parts[:-1])
    }
    sources = [inspect_file(path) for _, path in sorted(ranked.items()) if _is_text(path)]
    if not sources:
        raise DataError(
            f"{folder}: this Python carries no standard library as .py files; name text of your "
            f"own with --data (data.train)"
        )
    return tuple(sources)


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise unreadable(path, error) from None


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """The training or the validation part of a corpus."""

    field: str
    """Name for messages, ``data.train`` or ``data.validation``."""
    spans: tuple[Span, ...]
    identity: str
    """Content hash of the corpus and which part of it this is; equal only for equal text."""

    @property
    def source_bytes(self) -> int:
        """Bytes of input in all spans."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """The data as training needs it: two token files and the tokenizer."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer


def prepare(config: DataConfig, progress: Progress = no_progress) -> PreparedData:
    """Finds or makes the token files that a configuration asks for.

    Documents are separated by the tokenizer's end-of-text id, or by one newline if it has none.
    Calls with the same content find the same files by its hash, whatever the paths are; several
    processes may call this at once.

    Raises:
        ConfigError: The tokenizer cannot be trained on this corpus.
        DataError: Input cannot be used, or the cache cannot be written.
    """
    train, validation = _parts(config, progress)
    root = cache_root(config.cache_dir)
    tokenizer = _tokenizer(config.tokenizer, train, root, progress)
    return PreparedData(
        train=_token_file(train, tokenizer, root, progress),
        validation=_token_file(validation, tokenizer, root, progress),
        tokenizer=tokenizer,
    )


def prepare_one(
    paths: tuple[str, ...],
    tokenizer: Tokenizer,
    cache_dir: str = "",
    progress: Progress = no_progress,
) -> TokenFile:
    """Finds or makes the token file of one whole corpus for a tokenizer that exists.

    ``paths`` are as ``DataConfig.train``, but at least one; the rest is as for :func:`prepare`.
    """
    part = _whole(find_sources(paths, "--data"), "--data", progress)
    return _token_file(part, tokenizer, cache_root(cache_dir), progress)


def _parts(config: DataConfig, progress: Progress) -> tuple[CorpusPart, CorpusPart]:
    """Lists and hashes the files, and decides which bytes are train and which validation."""
    names = "data.train", "data.validation"
    train = find_sources(config.train, names[0]) if config.train else standard_library()
    validation = find_sources(config.validation, names[1]) if config.validation else ()
    known = {source.path.resolve() for source in train}
    for source in validation:
        if source.path.resolve() in known:
            raise DataError(
                f"{source.path}: is in both data.train and data.validation, so the validation loss "
                f"would say nothing; take it out of one of them"
            )
    corpus, fraction = _whole(train, names[0], progress), config.validation_fraction
    if validation:
        return corpus, _whole(validation, names[1], progress)
    first, last = split_corpus(train, fraction)
    return (
        CorpusPart(names[0], first, f"{corpus.identity} without its last {fraction!r}"),
        CorpusPart(names[1], last, f"{corpus.identity} only its last {fraction!r}"),
    )


def _whole(sources: tuple[Source, ...], field: str, progress: Progress) -> CorpusPart:
    return CorpusPart(field, whole(sources), content_sha256(sources, progress))


def _tokenizer(spec: str, part: CorpusPart, root: Path, progress: Progress) -> Tokenizer:
    if spec == "bytes":
        return ByteTokenizer()
    size = bpe_size(spec)
    if size is None:
        return load_tokenizer(spec)
    ids = size

    def build(folder: Path) -> None:
        texts = sample_pieces(read_pieces(part.spans), part.source_bytes, progress)
        trained = train_bpe(texts, ids)
        check_unchanged(span.source for span in part.spans)
        trained.save(folder)

    name = _name("bpe", ids, SAMPLE_BYTES, MIN_FREQUENCY, part.identity)
    return fetch(root / "tokenizers", name, load=_cached_tokenizer, build=build)


def _cached_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(folder)
    except DataError:
        return None


def _token_file(
    part: CorpusPart, tokenizer: Tokenizer, root: Path, progress: Progress
) -> TokenFile:
    def build(folder: Path) -> None:
        stream = encode_pieces(read_pieces(part.spans), tokenizer, part.source_bytes, progress)
        count = write_tokens(folder, stream, vocab_size=tokenizer.vocab_size)
        if count == 0:
            raise DataError(
                f"{part.spans[0].source.path}: there is no text here for {part.field}, only empty "
                f"documents; add text, or name other files"
            )
        check_unchanged(span.source for span in part.spans)

    name = _name("tokens", tokenizer.fingerprint, part.identity)
    return fetch(root / "tokens", name, load=load_tokens, build=build)


def _name(*parts: object) -> str:
    text = json.dumps([FORMAT_VERSION, *parts])
    return hashlib.sha256(text.encode()).hexdigest()
