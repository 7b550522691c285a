"""Paths, globs and folders become a list of files, each looked at once and checked.

A folder is searched recursively for the suffixes of ``FOLDER_SUFFIXES``, in the order of the
relative paths; names that start with a dot are left out (``.git``, ``.venv``). A file that is named
directly, or matched by a glob, is read as text whatever its suffix, except ``.jsonl`` and ``.bin``.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from halfstep.errors import DataError
from halfstep.trainer.data.progress import HASH, Progress, no_progress
from halfstep.words import Told

_told = Told("halfstep.trainer.data")

Kind: TypeAlias = Literal["text", "jsonl", "bin"]

KINDS: dict[str, Kind] = {".bin": "bin", ".jsonl": "jsonl"}
"""Kinds by suffix; the others are text."""
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".py", ".bin")
CHUNK_BYTES = 1 << 20
"""Size of one read from disk: large enough to hide the call's cost, small in memory."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input file as it was when it was listed."""

    path: Path
    kind: Kind
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of the last change, to notice a file that changes while it is read."""


def find_sources(paths: tuple[str, ...], field: str) -> tuple[Source, ...]:
    """Lists the files that paths, globs and folders stand for, in the order given.

    ``~`` is the home folder, and ``field`` what messages call the paths, such as ``data.train``.
    The sources are not empty, and either all of them are token files or none is.

    Raises:
        DataError: Something is missing, unreadable, empty, or token files and text are mixed.
    """
    sources = [source for path in paths for source in _expand(path, field)]
    binary = [source.path for source in sources if source.kind == "bin"]
    text = [source.path for source in sources if source.kind != "bin"]
    if binary and text:
        raise DataError(
            f"{field} mixes token files and text: {binary[0]} and {text[0]}; give only one of the "
            f"two"
        )
    return tuple(sources)


def inspect_file(path: Path) -> Source:
    """Looks at one file without reading it, or raises DataError if it is no regular file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(f"{path}: dangling symbolic link; check the path") from None
        raise DataError(_told("no_file", path=path)) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; give a file, a folder or a glob")
    kind = KINDS.get(path.suffix.lower(), "text")
    return Source(path, kind, status.st_size, status.st_mtime_ns)


def read_chunks(source: Source, start: int, stop: int) -> Iterator[bytes]:
    """Yields the bytes ``start`` to ``stop`` of a file in chunks of at most ``CHUNK_BYTES``.

    Raises:
        DataError: The file cannot be read, or ends before ``stop``.
    """
    try:
        with open(source.path, "rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(CHUNK_BYTES, stop - start))
                if not chunk:
                    raise changed(source)
                start += len(chunk)
                yield chunk
    except OSError as error:
        raise unreadable(source.path, error) from None


def content_sha256(sources: Iterable[Source], progress: Progress = no_progress) -> str:
    """Hashes kind, size and content of the files in order, but not their paths."""
    sources = tuple(sources)
    total, done = sum(source.size for source in sources), 0
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.kind}:{source.size}:".encode())
        for chunk in read_chunks(source, 0, source.size):
            digest.update(chunk)
            done += len(chunk)
            progress(HASH, done, total)
    return digest.hexdigest()


def check_unchanged(sources: Iterable[Source]) -> None:
    """Refuses files that changed, by size or time, since they were listed.

    The content hash names the cached result, so text that changes between the hash and the encoding
    would be kept under a wrong name for ever.
    """
    for source in sources:
        if inspect_file(source.path) != source:
            raise changed(source)


def unreadable(path: Path, error: OSError) -> DataError:
    """Makes the error for a file that cannot be read, for the caller to raise."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}; check path and rights")


def changed(source: Source) -> DataError:
    """Makes the error for a file that changed while it was read, for the caller to raise."""
    return DataError(
        f"{source.path}: changed while it was read (was {source.size} bytes); "
        f"run again when nothing writes to it"
    )


def _expand(given: str, field: str) -> list[Source]:
    path = Path(given).expanduser()
    if os.path.isdir(path):
        return _folder(path, field)
    # A name that exists is that file, even when it looks like a pattern ("draft[1].txt").
    if not os.path.lexists(path) and glob.has_magic(given):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        sources = [inspect_file(match) for match in matches if not os.path.isdir(match)]
        if not sources:
            raise DataError(f"{path}: this pattern of {field} matches no file; check it")
        return _not_all_empty(path, sources)
    source = inspect_file(path)
    if source.size == 0:
        raise DataError(f"{path}: the file is empty; remove it from {field} or fill it")
    return [source]


def _folder(folder: Path, field: str) -> list[Source]:
    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(parent, name) for name in files if not name.startswith(".")]
        found.extend(path for path in paths if path.suffix.lower() in FOLDER_SUFFIXES)
    if not found:
        raise DataError(
            f"{folder}: this folder of {field} holds no {', '.join(FOLDER_SUFFIXES)} file at any "
            f"depth (names with a leading dot are skipped); name files with other endings directly"
        )
    ordered = sorted(found, key=lambda path: path.relative_to(folder).as_posix())
    return _not_all_empty(folder, [inspect_file(path) for path in ordered])


def _not_all_empty(given: Path, sources: list[Source]) -> list[Source]:
    kept = [source for source in sources if source.size > 0]
    if not kept:
        raise DataError(f"{given}: all {len(sources)} files found here are empty; fill one")
    return kept
