"""Token files: raw little-endian integers on disk, kept in a cache, of which windows are read.

A cached folder is there whole, or not at all: it is built beside its final place,
synced and renamed in one step. A killed process leaves only a
temporary folder, ``.tmp-*``, which nobody reads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from halfstep.errors import DataError
from halfstep.files import sync, sync_folder
from halfstep.trainer.data.tokenizer import Ids

Progress: TypeAlias = Callable[[str, int, int], None]
"""``progress(what, done_bytes, total_bytes)``; ``what`` is one of the phases below."""

HASH = "hash"
"""Reading the input files to find their content hash; every call does this."""
TRAIN_TOKENIZER = "train tokenizer"
"""Feeding the corpus to the BPE trainer; the merges that follow the last byte report nothing."""
ENCODE = "encode"
"""Turning text into token files."""


def no_progress(what: str, done: int, total: int) -> None:
    """Reports nothing; the default."""


T = TypeVar("T")


def cache_root(configured: str) -> Path:
    """The configured folder, else $HALFSTEP_CACHE, $XDG_CACHE_HOME/halfstep or ~/.cache/halfstep.

    **Source:** XDG Base Directory Specification.
    """
    chosen = configured or os.environ.get("HALFSTEP_CACHE", "")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    return Path(base).expanduser() / "halfstep"


def fetch(
    root: Path, name: str, *, load: Callable[[Path], T | None], build: Callable[[Path], None]
) -> T:
    """Returns the result kept under ``root / name``, building it first if it is absent or damaged.

    The name is made from everything that the result depends on. Of several processes that build it
    at once, each gets the one that was renamed first. ``load`` reads and verifies a result, None if
    it is absent or damaged; ``build`` writes one into an empty folder.

    Raises:
        DataError: The cache cannot be written, for instance because the disk is full.
    """
    final = root / name
    found = load(final)
    if found is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".tmp-{name[:16]}-", dir=root) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            build(new)
            sync_folder(new)
            try:
                os.rename(new, final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                if load(final) is None:  # damaged; otherwise another process was first
                    os.rename(final, Path(temporary) / "damaged")
                    os.rename(new, final)
            sync(root)
    except OSError as error:
        raise cannot_write(Path(error.filename or final), error) from None
    found = load(final)
    if found is None:
        raise DataError(
            f"{final}: damaged as soon as it was written; check the disk, or set data.cache_dir or "
            f"HALFSTEP_CACHE to another one"
        )
    return found


def cannot_write(path: Path, error: OSError) -> DataError:
    """Makes the error for a failed write; an exceeded quota counts as a full disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        why = "no space left; free some"
    else:
        why = f"cannot be written: {error.strerror or error}; check the rights"
    return DataError(f"{path}: {why}, or set data.cache_dir or HALFSTEP_CACHE to another disk")


TokenType: TypeAlias = Literal["uint16", "uint32"]
Tokens: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

TOKENS_FILE, FACTS_FILE = "tokens.bin", "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The tokens of a prepared file."""

    path: Path
    dtype: TokenType
    """How a token is stored, little-endian."""
    count: int
    """Number of tokens, at least 1."""
    text_bytes: int
    """UTF-8 bytes of the text they encode, separators of one newline included.

    Bits per byte = nats per token / ln 2 * count / text_bytes.
    """
    vocab_size: int
    """Every token is below it; this was checked."""
    sha256: str
    """SHA-256 of the stored bytes of these tokens, 64 hexadecimal digits."""

    def windows(self, starts: Sequence[int], length: int) -> Tokens:
        """Reads the ``length`` tokens from each start on; zeros where the tokens end before.

        They are read and not mapped: a map that lives on keeps every page it ever touched in the
        memory of the process, and making one takes longer than reading some windows.

        Returns:
            A read-only array of shape (len(starts), length).

        Raises:
            DataError: The file is gone or has become too short.
        """
        stored = _stored(self.dtype)
        wide = stored.itemsize
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                size = os.fstat(file).st_size
                if size < self.count * wide:
                    raise DataError(
                        f"{self.path}: {size} bytes are left of at least {self.count * wide}; "
                        f"restore the file or prepare it again"
                    )
                rows = []
                for start in starts:
                    inside = min(start + length, self.count) - start
                    raw = os.pread(file, inside * wide, start * wide)
                    rows.append(raw.ljust(length * wide, b"\0"))
            finally:
                os.close(file)
        except OSError as error:
            raise DataError(
                f"{self.path}: token file cannot be read: {error.strerror or error}; "
                f"restore it or prepare it again"
            ) from None
        return np.frombuffer(b"".join(rows), stored).reshape(len(starts), length)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of some text, on their way to disk."""

    ids: Ids
    text_bytes: int
    """UTF-8 bytes that ``ids`` stand for."""


def write_tokens(folder: Path, stream: Iterable[Encoded], *, vocab_size: int) -> int:
    """Writes the tokens, each below ``vocab_size``, and the facts about them into an empty folder.

    Returns:
        How many tokens there are.
    """
    path = folder / TOKENS_FILE
    # the smallest type that holds every id
    dtype: TokenType = "uint16" if vocab_size <= 1 << 16 else "uint32"
    digest = hashlib.sha256()
    count = text_bytes = 0
    with open(path, "wb") as file:
        for part in stream:
            raw = part.ids.astype(_stored(dtype)).tobytes()
            file.write(raw)
            digest.update(raw)
            count += len(part.ids)
            text_bytes += part.text_bytes
    facts = {
        "dtype": dtype,
        "count": count,
        "text_bytes": text_bytes,
        "vocab_size": vocab_size,
        "sha256": digest.hexdigest(),
    }
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return count


def load_tokens(folder: Path) -> TokenFile | None:
    """Opens what ``write_tokens`` wrote; None if it is absent or cut short."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        found = TokenFile(path=folder / TOKENS_FILE, **facts)
        size = found.path.stat().st_size
    except (OSError, ValueError, TypeError):
        return None
    return found if size == found.count * _stored(found.dtype).itemsize else None


def _stored(dtype: TokenType) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
