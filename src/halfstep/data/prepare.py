"""``prepare`` turns what the user named into two token files, once, and finds them ever after.

::

    list files -> hash contents -> split -> tokenizer (loaded, cached, or trained on train only)
    -> each part: cached token file, or encode into the cache     (``.bin``: checked, used in place)

Nothing is ever loaded whole: text passes in batches of a few MiB (``encode.py``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from halfstep.data.bin_files import TokenSpan, check_ids, split_file, whole_file
from halfstep.data.cache import cache_root, fetch
from halfstep.data.config import DataConfig, bpe_size
from halfstep.data.documents import Span, read_pieces, whole
from halfstep.data.encode import encode
from halfstep.data.progress import Progress, no_progress
from halfstep.data.sources import Source, check_unchanged, content_sha256, find_sources
from halfstep.data.split import split
from halfstep.data.stdlib import standard_library
from halfstep.data.token_file import TokenFile, load_tokens, write_tokens
from halfstep.data.tokenizer import ByteTokenizer, Tokenizer
from halfstep.data.tokenizer_files import load_tokenizer
from halfstep.data.tokenizer_training import MIN_FREQUENCY, SAMPLE_BYTES, train_bpe
from halfstep.errors import ConfigError, DataError

FORMAT_VERSION = 1
"""Part of every cache name: raise it when the same input would give other files."""

FINGERPRINT_FILE = "fingerprint"
"""Beside a cached tokenizer: the fingerprint it had when it was trained."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text of train or of validation."""

    field: str
    """Name for messages, ``data.train`` or ``data.validation``."""
    spans: tuple[Span, ...]
    identity: str
    """Equal for equal text: the content hash of the corpus and which part of it this is."""

    @property
    def source_bytes(self) -> int:
        """Bytes of input in all spans."""
        return sum(span.stop - span.start for span in self.spans)


Part: TypeAlias = TextPart | TokenSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """All that training needs of the data."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer


def prepare(config: DataConfig, progress: Progress = no_progress) -> PreparedData:
    """Finds or makes the token files that a configuration asks for.

    Documents are separated by the tokenizer's end-of-text id, or by one newline if it has none.
    Calls with the same content find the same files by its hash, whatever the paths are; several
    processes may call this at once. ``.bin`` files are used in place.

    Args:
        config: What the user asks for.
        progress: Called as ``progress(what, done_bytes, total_bytes)``, see ``progress.py``.

    Returns:
        The token files and the tokenizer.

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
    """Finds or makes the token file of one corpus, all of it, for a tokenizer that exists.

    Args:
        paths: Files, globs and folders, as ``DataConfig.train``; at least one.
        tokenizer: What encodes it.
        cache_dir: As in ``DataConfig``.
        progress: As for :func:`prepare`.

    Raises:
        DataError: Input cannot be used, or the cache cannot be written.
    """
    part = _whole(find_sources(paths, "--data"), "--data", progress)
    return _token_file(part, tokenizer, cache_root(cache_dir), progress)


def _parts(config: DataConfig, progress: Progress) -> tuple[Part, Part]:
    """Lists and hashes the files, and decides which bytes are train and which validation."""
    train = find_sources(config.train, "data.train") if config.train else standard_library()
    validation = find_sources(config.validation, "data.validation") if config.validation else ()
    _check_combination(config.tokenizer, train, validation)
    if validation:
        return (
            _whole(train, "data.train", progress),
            _whole(validation, "data.validation", progress),
        )
    fraction = config.validation_fraction
    if _is_bin(train):
        return split_file(whole_file(train, "data.train"), fraction)
    content = content_sha256(train, progress)
    first, last = split(train, fraction)
    return (
        TextPart("data.train", first, f"{content} without its last {fraction!r}"),
        TextPart("data.validation", last, f"{content} only its last {fraction!r}"),
    )


def _whole(sources: tuple[Source, ...], field: str, progress: Progress) -> Part:
    if _is_bin(sources):
        return whole_file(sources, field)
    return TextPart(field, whole(sources), content_sha256(sources, progress))


def _is_bin(sources: tuple[Source, ...]) -> bool:
    return sources[0].kind == "bin"  # find_sources refuses mixtures


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


def _tokenizer(spec: str, train: Part, root: Path, progress: Progress) -> Tokenizer:
    if spec == "bytes":
        return ByteTokenizer()
    size = bpe_size(spec)
    if size is None:
        return load_tokenizer(spec)
    # _check_combination refused bpe:N with anything but text.
    assert isinstance(train, TextPart)
    part, ids = train, size

    def build(folder: Path) -> None:
        pieces = read_pieces(part.spans)
        trained = train_bpe(pieces, ids, total_bytes=part.source_bytes, progress=progress)
        check_unchanged(span.source for span in part.spans)
        trained.save(folder)
        _write_fingerprint(folder, trained)

    name = _name("bpe", ids, SAMPLE_BYTES, MIN_FREQUENCY, part.identity)
    return fetch(root / "tokenizers", name, load=_cached_tokenizer, build=build)


def _write_fingerprint(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / FINGERPRINT_FILE).write_text(tokenizer.fingerprint + "\n", encoding="utf-8")


def _cached_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        tokenizer = load_tokenizer(folder)
        expected = (folder / FINGERPRINT_FILE).read_text(encoding="utf-8").strip()
    except (DataError, OSError, ValueError):
        return None
    return tokenizer if tokenizer.fingerprint == expected else None


def _token_file(part: Part, tokenizer: Tokenizer, root: Path, progress: Progress) -> TokenFile:
    if isinstance(part, TokenSpan):
        return check_ids(part, tokenizer, progress)

    def build(folder: Path) -> None:
        stream = encode(read_pieces(part.spans), tokenizer, part.source_bytes, progress)
        count = write_tokens(
            folder, stream, vocab_size=tokenizer.vocab_size, source_bytes=part.source_bytes
        )
        if count == 0:
            raise DataError(
                f"{part.spans[0].source.path}: there is no text here for {part.field}, only empty "
                f"documents; add text, or name other files"
            )
        check_unchanged(span.source for span in part.spans)

    def load(folder: Path) -> TokenFile | None:
        return load_tokens(folder, progress)

    name = _name("tokens", tokenizer.fingerprint, part.identity)
    return fetch(root / "tokens", name, load=load, build=build)


def _name(*parts: object) -> str:
    text = json.dumps([FORMAT_VERSION, *parts])
    return hashlib.sha256(text.encode()).hexdigest()
