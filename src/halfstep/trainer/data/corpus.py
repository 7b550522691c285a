"""Turns a corpus of text into two token files once, and later finds them in a cache.

::

    list files -> hash contents -> split -> tokenizer (loaded, cached, or trained on train only)
    -> each part: cached token file, or encode into the cache

A file is one document. Nothing is ever loaded whole: text passes in pieces that fit in memory and
join to exactly that text.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np

from halfstep.errors import DataError
from halfstep.trainer.data.batches import held_out
from halfstep.trainer.data.config import DataConfig, bpe_size
from halfstep.trainer.data.records import (
    Source,
    check_unchanged,
    content_sha256,
    decode,
    find_sources,
    inspect_file,
)
from halfstep.trainer.data.token_file import (
    Ids,
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
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

Item = TypeVar("Item")

PIECE_BYTES = 1 << 18
"""Size of a piece: a batch of several keeps all cores busy; one piece's tokens take some 10 MB."""
BATCH_CHARACTERS = 4 << 20
"""Amount of text encoded at once. The tokenizers library needs about 100 bytes per token, so 4 MiB
of text take some 150 MB of memory while they are encoded."""
SAMPLE_BYTES = 64 << 20
"""Limit of the text that a tokenizer is trained on, which bounds the memory; 8,192 merges need far
less."""
WINDOW_BYTES = 1 << 16
"""Distance from the exact position of a split within which a newline is sought."""


class TextPiece(NamedTuple):
    """A part of one document, never empty."""

    text: str
    begins: bool  # whether a document starts here


def read_pieces(sources: Iterable[Source], size: int = PIECE_BYTES) -> Iterator[TextPiece]:
    """Yields all documents in order, in pieces of at most ``size`` bytes, at least 4.

    Empty documents yield none.
    """
    for source in sources:
        at, begins = source.start, True
        with open(source.path, "rb") as file:
            file.seek(at)
            for raw in split_pieces(file, source.stop, size):
                text = decode(raw, str(source.path), at)
                text = text if at else text.removeprefix("\ufeff")  # the byte order mark
                at += len(raw)
                if text:
                    yield TextPiece(text, begins)
                    begins = False


def split_pieces(file: BinaryIO, stop: int, size: int) -> Iterator[bytes]:
    """Cuts UTF-8 up to byte ``stop`` into pieces of at most ``size`` bytes, of whole characters.

    A cut falls after the last newline that fits, else before the last blank, else between two
    characters. Where it falls depends on the text and the piece size alone, so the tokens of a file
    are the same on every machine.
    """
    held = b""
    while held := held + file.read(min(size + 1 - len(held), stop - file.tell())):
        cut = _cut(held, size) if len(held) > size else len(held)
        yield held[:cut]
        held = held[cut:]


def _cut(data: bytes, stop: int) -> int:
    """Finds where a piece of at most ``stop`` bytes ends: 0 < cut <= stop < len(data)."""
    newline = data.rfind(b"\n", 0, stop)
    if newline >= 0:
        return newline + 1
    # Before the blank, not after it: GPT-2 style tokenizers join a blank to the word it precedes.
    blank = max(data.rfind(b" ", 0, stop), data.rfind(b"\t", 0, stop))
    return blank if blank > 0 else character_start(data, stop)


def character_start(data: bytes, index: int) -> int:
    """Moves an index back to the start of the UTF-8 character it falls into.

    ``index`` itself is returned where no start lies within 3 bytes, which is not UTF-8.
    """
    starts = (at for at in range(index, max(index - 4, -1), -1) if data[at] & 0xC0 != 0x80)
    return next(starts, index)


# Splitting a corpus without validation files: the tail of its bytes becomes validation.


def split_corpus(
    sources: tuple[Source, ...], fraction: float
) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Cuts a corpus near its last ``fraction`` of bytes, in document order.

    The file in which the place falls is cut too: at the next newline (else the one before, else
    between two characters). The two parts together hold every byte once, in order.
    """
    total = sum(source.size for source in sources)
    place = total - held_out(total, fraction)
    index = 0
    while place >= sources[index].size:
        place -= sources[index].size
        index += 1
    source = sources[index]
    cut = _text_cut(source, place, may_be_start=index > 0)  # of the first file, train keeps a part
    # A cut at the border of a file leaves an empty span on one side of it.
    parts = (
        (*sources[:index], replace(source, stop=cut)),
        (replace(source, start=cut), *sources[index + 1 :]),
    )
    train, validation = (tuple(s for s in part if s.size) for part in parts)
    if not train or not validation:
        raise DataError(
            f"{sources[0].path}: {total} bytes in too few documents to hold some out for "
            f"validation; add text or give data.validation"
        )
    return train, validation


def _text_cut(source: Source, place: int, *, may_be_start: bool) -> int:
    """Finds the newline after a place, else the one before, else the start of a character."""
    if place == 0 and may_be_start:
        return 0
    low = max(0, place - WINDOW_BYTES)
    at = place - low
    with open(source.path, "rb") as file:
        file.seek(low)
        data = file.read(at + WINDOW_BYTES)
    newlines = (data.find(b"\n", max(at - 1, 0)) + 1, data.rfind(b"\n", 0, at) + 1)
    for cut in (*newlines, character_start(data, at)):
        if cut > 0 and low + cut < source.size:
            return low + cut
    return 0 if may_be_start else source.size


def encode_pieces(
    pieces: Iterable[TextPiece], tokenizer: Tokenizer, total: int, progress: Progress = no_progress
) -> Iterator[tuple[Ids, int]]:
    """Encodes documents batch by batch, with a separator between two of them.

    The tokenizer's end-of-text id, else its ids of a newline, are the separator. ``total`` is the
    size of the input in bytes. Yields ids, and the UTF-8 bytes that they stand for.
    """
    end = tokenizer.end_of_text
    ids = tokenizer.encode("\n") if end is None else [end]
    separator, separator_bytes = np.array(ids, dtype=np.uint32), 1 if end is None else 0
    done, first = 0, True
    for batch in in_batches(pieces, lambda piece: len(piece.text)):
        parts: list[Ids] = []
        text_bytes = 0
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, ids_of_piece in zip(batch, encoded, strict=True):
            if piece.begins and not first:
                parts.append(separator)
                text_bytes += separator_bytes
            first = False
            parts.append(ids_of_piece)
            text_bytes += len(piece.text.encode())
        yield np.concatenate(parts), text_bytes
        done += text_bytes
        progress("encode", done, total)


def in_batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups items until their sizes reach ``BATCH_CHARACTERS``."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


FORMAT_VERSION = 2
"""Part of every cache name; increase it when the same input would give different files."""
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
"""Folders of tests (many are deliberately not UTF-8), of installed packages, and of wheels."""


def standard_library() -> tuple[Source, ...]:
    """Lists the ``.py`` files of the standard library, a corpus that every user already has.

    They are sorted by the SHA-256 of their relative paths, which is a fixed order and makes the
    tail that becomes validation a fair sample of the library, not its letters x to z. Empty files
    and those that are not UTF-8 are left out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    ranked = {
        hashlib.sha256(name.as_posix().encode("utf-8", "surrogateescape")).digest(): folder / name
        for name in (path.relative_to(folder) for path in folder.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(name.parts[:-1])
    }
    sources = []
    for _, path in sorted(ranked.items()):
        with suppress(UnicodeDecodeError):
            if path.read_bytes().decode():
                sources.append(inspect_file(path))
    if not sources:
        raise DataError(
            f"{folder}: this Python carries no standard library as .py files; name text of your "
            f"own with --data (data.train)"
        )
    return tuple(sources)


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
    """
    train, validation = _parts(config)
    tokenizer = _tokenizer(config.tokenizer, train, progress)
    return PreparedData(
        train=_token_file(train, tokenizer, progress),
        validation=_token_file(validation, tokenizer, progress),
        tokenizer=tokenizer,
    )


def prepare_one(
    paths: tuple[str, ...], tokenizer: Tokenizer, progress: Progress = no_progress
) -> TokenFile:
    """Finds or makes the token file of one whole corpus for a tokenizer that exists."""
    return _token_file(_texts(paths), tokenizer, progress)


def _texts(paths: tuple[str, ...]) -> tuple[Source, ...]:
    sources = find_sources(paths)
    for source in sources:
        if source.path.suffix.lower() == ".jsonl":
            raise DataError(
                f"{source.path}: holds records, which halfstep finetune lm learns from; give text"
            )
    return sources


def _parts(config: DataConfig) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    train = _texts(config.train) if config.train else standard_library()
    validation = _texts(config.validation)
    known = {source.path.resolve() for source in train}
    for source in validation:
        if source.path.resolve() in known:
            raise DataError(
                f"{source.path}: is in both data.train and data.validation, so the validation loss "
                f"would say nothing; take it out of one of them"
            )
    return (train, validation) if validation else split_corpus(train, config.validation_fraction)


def _tokenizer(spec: str, sources: tuple[Source, ...], progress: Progress) -> Tokenizer:
    if spec == "bytes":
        return ByteTokenizer()
    size = bpe_size(spec)
    if size is None:
        return load_tokenizer(spec)
    ids, total = size, sum(source.size for source in sources)
    every = -(-total // SAMPLE_BYTES)

    def build(folder: Path) -> None:
        progress("train tokenizer", 0, total // every)
        texts = (piece.text for piece in islice(read_pieces(sources), 0, None, every))
        trained = train_bpe(texts, ids)
        check_unchanged(sources)
        trained.save(folder)

    name = _name("bpe", ids, every, MIN_FREQUENCY, content_sha256(sources))
    return fetch(cache_root() / "tokenizers", name, load=_cached_tokenizer, build=build)


def _cached_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(folder)
    except DataError:
        return None


def _token_file(sources: tuple[Source, ...], tokenizer: Tokenizer, progress: Progress) -> TokenFile:
    def build(folder: Path) -> None:
        total = sum(source.size for source in sources)
        stream = encode_pieces(read_pieces(sources), tokenizer, total, progress)
        if write_tokens(folder, stream, vocab_size=tokenizer.vocab_size) == 0:
            raise DataError(f"{sources[0].path}: there is no text here, only empty documents")
        check_unchanged(sources)

    name = _name("tokens", tokenizer.fingerprint, content_sha256(sources))
    return fetch(cache_root() / "tokens", name, load=load_tokens, build=build)


def _name(*parts: object) -> str:
    text = json.dumps([FORMAT_VERSION, *parts])
    return hashlib.sha256(text.encode()).hexdigest()
