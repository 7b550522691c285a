"""A token file is raw little-endian integers on disk, of which only single windows are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from halfstep.errors import DataError
from halfstep.trainer.data.cache import cannot_write
from halfstep.trainer.data.progress import CHECK, Progress, no_progress
from halfstep.trainer.data.tokenizer import Ids

TokenType: TypeAlias = Literal["uint16", "uint32"]
Tokens: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

TOKENS_FILE, FACTS_FILE = "tokens.bin", "facts.json"
READ_BYTES = 4 << 20
"""One read when a whole file is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A run of tokens in a file: all of a prepared one, or a part of a user's ``.bin`` file."""

    path: Path
    dtype: TokenType
    """How a token is stored, little-endian."""
    offset: int
    """Tokens of the file before the first one of these."""
    count: int
    """Number of tokens, at least 1."""
    text_bytes: int | None
    """UTF-8 bytes of the text they encode, separators of one newline included; None if unknown.

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
        wide, end = stored.itemsize, self.offset + self.count
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                size = os.fstat(file).st_size
                if size < end * wide:
                    raise DataError(
                        f"{self.path}: {size} bytes are left of at least {end * wide}; restore the "
                        f"file or prepare it again"
                    )
                rows = []
                for start in starts:
                    first = self.offset + start
                    raw = os.pread(file, (min(first + length, end) - first) * wide, first * wide)
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
    source_bytes: int
    """Bytes of input used up so far, in all."""


def write_tokens(
    folder: Path, stream: Iterable[Encoded], *, vocab_size: int, source_bytes: int
) -> int:
    """Writes the tokens and the facts about them that ``load_tokens`` verifies.

    Args:
        folder: An empty folder that exists.
        stream: The ids, in order, each below ``vocab_size``.
        vocab_size: Of the tokenizer.
        source_bytes: Bytes of input that the whole stream uses up, to foresee the final size.

    Returns:
        How many tokens there are.
    """
    path = folder / TOKENS_FILE
    # the smallest type that holds every id
    dtype: TokenType = "uint16" if vocab_size <= 1 << 16 else "uint32"
    digest = hashlib.sha256()
    count = text_bytes = done = 0
    try:
        with open(path, "wb") as file:
            for part in stream:
                raw = part.ids.astype(_stored(dtype)).tobytes()
                done = part.source_bytes
                count += len(part.ids)
                file.write(raw)
                digest.update(raw)
                text_bytes += part.text_bytes
    except OSError as error:
        foreseen = count * _stored(dtype).itemsize * source_bytes // max(done, 1)
        raise cannot_write(path, error, f" (about {foreseen} bytes are needed)") from None
    facts = {
        "dtype": dtype,
        "count": count,
        "text_bytes": text_bytes,
        "vocab_size": vocab_size,
        "sha256": digest.hexdigest(),
    }
    sealed = json.dumps({"facts": facts, "seal": _seal(facts)}, indent=2)
    (folder / FACTS_FILE).write_text(sealed + "\n", encoding="utf-8")
    return count


def load_tokens(folder: Path, progress: Progress = no_progress) -> TokenFile | None:
    """Opens what ``write_tokens`` wrote; None if it is absent, cut short or altered in any byte."""
    try:
        sealed = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        if sealed["seal"] != _seal(sealed["facts"]):
            return None
        found = TokenFile(path=folder / TOKENS_FILE, offset=0, **sealed["facts"])
        size = found.count * _stored(found.dtype).itemsize
        if found.path.stat().st_size != size:
            return None
        digest = hashlib.sha256()
        done = 0
        with open(found.path, "rb") as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress(CHECK, done, size)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if digest.hexdigest() == found.sha256 else None


def _seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _stored(dtype: TokenType) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
