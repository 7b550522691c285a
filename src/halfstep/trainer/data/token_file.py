"""Token files: raw little-endian integers on disk, kept in a cache, of which windows are read.

A cached folder is there whole, or not at all: it is built beside its final place, synced and
renamed in one step. A killed process leaves only a temporary folder, ``.tmp-*``, which nobody
reads.
"""

from __future__ import annotations

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

Progress: TypeAlias = Callable[[str, int, int], None]
"""``progress(what, done_bytes, total_bytes)``."""


def no_progress(what: str, done: int, total: int) -> None:
    """Reports nothing; the default."""


T = TypeVar("T")


def cache_root() -> Path:
    """Returns $HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else ~/.cache/halfstep.

    **Source:** XDG Base Directory Specification.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HALFSTEP_CACHE") or f"{base}/halfstep").expanduser()


def fetch(
    root: Path, name: str, *, load: Callable[[Path], T | None], build: Callable[[Path], None]
) -> T:
    """Returns the result kept under ``root / name``, building it first if it is absent or damaged.

    The name is made from everything that the result depends on. Of several processes that build it
    at once, each gets the one that was renamed first. ``load`` reads and verifies a result, None if
    it is absent or damaged; ``build`` writes one into an empty folder.
    """
    final = root / name
    found = load(final)
    if found is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".tmp-{name[:16]}-", dir=root) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        build(new)
        sync_folder(new)
        try:
            os.rename(new, final)
        except OSError:  # something is there
            if load(final) is None:  # damaged; otherwise another process was first
                os.rename(final, Path(temporary) / "damaged")
                os.rename(new, final)
        sync(root)
    found = load(final)
    if found is None:
        raise DataError(f"{final}: damaged as soon as it was written; check the disk")
    return found


Ids: TypeAlias = npt.NDArray[np.uint32]
TokenType: TypeAlias = Literal["uint16", "uint32"]

TOKENS_FILE, FACTS_FILE = "tokens.bin", "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The tokens of a prepared file."""

    path: Path
    dtype: TokenType  # little-endian
    count: int  # tokens, at least 1
    text_bytes: int  # of the text they encode in UTF-8, separators of one newline included
    sha256: str  # of the stored bytes

    def windows(self, starts: Sequence[int], length: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Reads the ``length`` tokens from each start on; zeros where the tokens end before.

        They are read and not mapped: a map that lives on keeps every page it ever touched in the
        memory of the process, and making one takes longer than reading some windows.

        Returns:
            A read-only array of shape (len(starts), length).
        """
        stored = _stored(self.dtype)
        wide, rows = stored.itemsize, []
        with open(self.path, "rb", buffering=0) as file:
            for start in starts:
                file.seek(start * wide)
                raw = file.read(length * wide)
                if len(raw) < min(length, self.count - start) * wide:
                    raise DataError(f"{self.path}: was cut; remove its folder to prepare it again")
                rows.append(raw.ljust(length * wide, b"\0"))
        return np.frombuffer(b"".join(rows), stored).reshape(len(starts), length)


def write_tokens(folder: Path, stream: Iterable[tuple[Ids, int]], *, vocab_size: int) -> int:
    """Writes tokens, each below ``vocab_size``, and the facts about them into an empty folder.

    ``stream`` yields ids and the UTF-8 bytes of the text that they stand for.

    Returns:
        How many tokens there are.
    """
    path = folder / TOKENS_FILE
    # the smallest type that holds every id
    dtype: TokenType = "uint16" if vocab_size <= 1 << 16 else "uint32"
    digest = hashlib.sha256()
    count = text_bytes = 0
    with open(path, "wb") as file:
        for ids, encoded in stream:
            raw = ids.astype(_stored(dtype)).tobytes()
            file.write(raw)
            digest.update(raw)
            count += len(ids)
            text_bytes += encoded
    facts = {
        "dtype": dtype,
        "count": count,
        "text_bytes": text_bytes,
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
