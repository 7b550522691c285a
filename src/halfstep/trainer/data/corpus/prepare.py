"""``prepare`` turns the user's files into two token files once, and later finds them in a cache.

::

    list files -> hash contents -> split -> tokenizer (loaded, cached, or trained on train only)
    -> each part: cached token file, or encode into the cache     (``.bin``: checked, used in place)

Nothing is ever loaded whole: text passes in batches of a few MiB.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.cache import cache_root, fetch
from halfstep.trainer.data.config import DataConfig, bpe_size
from halfstep.trainer.data.corpus.documents import (
    SAMPLE_BYTES,
    Span,
    encode_pieces,
    held_out,
    read_pieces,
    sample_pieces,
    split_corpus,
    too_small,
    whole,
)
from halfstep.trainer.data.corpus.token_file import TokenFile, load_tokens, write_tokens
from halfstep.trainer.data.progress import CHECK, Progress, no_progress
from halfstep.trainer.data.sources import (
    Source,
    check_unchanged,
    content_sha256,
    find_sources,
    inspect_file,
    read_chunks,
    unreadable,
)
from halfstep.trainer.data.tokenizer import (
    MIN_FREQUENCY,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

FORMAT_VERSION = 1
"""Part of every cache name; increase it when the same input would give different files."""
FINGERPRINT_FILE = "fingerprint"
"""File beside a cached tokenizer, with the fingerprint that it had after training."""
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
"""Folders of tests (many are deliberately not UTF-8), of installed packages, and of wheels."""
ITEM_BYTES = 2
"""Bytes of a token in nanoGPT's ``.bin`` files, which are used in place without a copy: raw
little-endian uint16 without a header. **Source:** nanoGPT ``data/openwebtext/prepare.py``, which
writes them, and ``train.py``."""


def check_ids(span: Span, tokenizer: Tokenizer, progress: Progress = no_progress) -> TokenFile:
    """Reads every token of a ``.bin`` file once and checks that the tokenizer has its id.

    ``text_bytes`` of the view is exact where the tokenizer knows the bytes of each id.
    """
    source, vocab_size, lengths = span.source, tokenizer.vocab_size, tokenizer.token_bytes
    digest = hashlib.sha256()
    at, text_bytes = span.start, 0
    for chunk in read_chunks(source, span.start, span.stop):
        digest.update(chunk)
        ids = np.frombuffer(chunk, dtype="<u2")
        bad = np.flatnonzero(ids >= vocab_size)
        if len(bad):
            place = at + int(bad[0]) * ITEM_BYTES
            raise DataError(
                f"{source.path}: token {ids[bad[0]]} at offset {place // ITEM_BYTES} (byte "
                f"{place}) is outside the vocabulary of {vocab_size} ids; give the tokenizer that "
                f"wrote the file as data.tokenizer"
            )
        if lengths is not None:
            text_bytes += int(lengths[ids].sum())
        at += ids.nbytes
        progress(CHECK, at - span.start, span.stop - span.start)
    return TokenFile(
        path=source.path,
        dtype="uint16",
        offset=span.start // ITEM_BYTES,
        count=(span.stop - span.start) // ITEM_BYTES,
        text_bytes=None if lengths is None else text_bytes,
        vocab_size=vocab_size,
        sha256=digest.hexdigest(),
    )


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
    """The training or the validation part of a corpus: text, or one span of a ``.bin`` file."""

    field: str
    """Name for messages, ``data.train`` or ``data.validation``."""
    spans: tuple[Span, ...]
    identity: str = ""
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
    processes may call this at once. ``.bin`` files are used in place.

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
    _check_combination(config.tokenizer, train, validation)
    if validation:
        return _whole(train, names[0], progress), _whole(validation, names[1], progress)
    corpus, fraction = _whole(train, names[0], progress), config.validation_fraction
    if train[0].kind != "bin":
        first, last = split_corpus(train, fraction)
    else:
        (span,) = corpus.spans
        cut = span.stop - held_out(span.stop // ITEM_BYTES, fraction) * ITEM_BYTES
        if cut == 0:
            raise too_small([span.source.path], span.stop)
        first, last = (replace(span, stop=cut),), (replace(span, start=cut),)
    return (
        CorpusPart(names[0], first, f"{corpus.identity} without its last {fraction!r}"),
        CorpusPart(names[1], last, f"{corpus.identity} only its last {fraction!r}"),
    )


def _whole(sources: tuple[Source, ...], field: str, progress: Progress) -> CorpusPart:
    if sources[0].kind != "bin":
        return CorpusPart(field, whole(sources), content_sha256(sources, progress))
    source = sources[0]  # and the others are token files too: find_sources refuses mixtures
    if len(sources) > 1:
        raise DataError(
            f"{field} names {len(sources)} .bin files ({source.path}, {sources[1].path}, ...), but "
            f"one is used in place; name one for data.validation, or join the shards with cat"
        )
    if source.size % ITEM_BYTES:
        raise DataError(
            f"{source.path}: {source.size} bytes are not a whole number of uint16 tokens (2 bytes "
            f"each); the file is cut short or no nanoGPT .bin file: write it again"
        )
    return CorpusPart(field, whole(sources))


def _check_combination(
    tokenizer: str, train: tuple[Source, ...], validation: tuple[Source, ...]
) -> None:
    binary = [source.path for source in (*train, *validation) if source.kind == "bin"]
    if binary and bpe_size(tokenizer) is not None:
        raise ConfigError(
            f"data.tokenizer {tokenizer} cannot go with token files ({binary[0]}): BPE is trained "
            f"on text, not on ids; give the path of the tokenizer that wrote them, or bytes"
        )
    known = {source.path.resolve() for source in train}
    for source in validation:
        if source.path.resolve() in known:
            raise DataError(
                f"{source.path}: is in both data.train and data.validation, so the validation loss "
                f"would say nothing; take it out of one of them"
            )


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
        (folder / FINGERPRINT_FILE).write_text(trained.fingerprint + "\n", encoding="utf-8")

    name = _name("bpe", ids, SAMPLE_BYTES, MIN_FREQUENCY, part.identity)
    return fetch(root / "tokenizers", name, load=_cached_tokenizer, build=build)


def _cached_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        tokenizer = load_tokenizer(folder)
        expected = (folder / FINGERPRINT_FILE).read_text(encoding="utf-8").strip()
    except (DataError, OSError, ValueError):
        return None
    return tokenizer if tokenizer.fingerprint == expected else None


def _token_file(
    part: CorpusPart, tokenizer: Tokenizer, root: Path, progress: Progress
) -> TokenFile:
    if part.spans[0].source.kind == "bin":
        return check_ids(part.spans[0], tokenizer, progress)

    def build(folder: Path) -> None:
        stream = encode_pieces(read_pieces(part.spans), tokenizer, part.source_bytes, progress)
        count = write_tokens(
            folder, stream, vocab_size=tokenizer.vocab_size, source_bytes=part.source_bytes
        )
        if count == 0:
            raise DataError(
                f"{part.spans[0].source.path}: there is no text here for {part.field}, only empty "
                f"documents; add text, or name other files"
            )
        check_unchanged(span.source for span in part.spans)

    name = _name("tokens", tokenizer.fingerprint, part.identity)
    return fetch(
        root / "tokens", name, load=lambda folder: load_tokens(folder, progress), build=build
    )


def _name(*parts: object) -> str:
    text = json.dumps([FORMAT_VERSION, *parts])
    return hashlib.sha256(text.encode()).hexdigest()
