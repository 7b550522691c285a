"""Folders of a disk or of an object store, through fsspec; faults that may pass are waited out."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from halfstep.errors import CheckpointError, StorageError
from halfstep.files import sync

T = TypeVar("T")
Where = Path | str
"""A folder of this machine, or an URL that fsspec knows, such as ``s3://bucket/run``."""

_WAITS = (0.5, 2.0, 8.0)  # seconds before each further try
# What waiting does not change; all else, such as a full disk, may pass.
_LASTING = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EACCES,
    errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def below(folder: Where, name: str) -> Any:
    """The place of a file or folder in a folder, spelled as that is."""
    return folder / name if isinstance(folder, Path) else f"{folder.rstrip('/')}/{name}"


def is_local(where: Where) -> bool:
    """Whether it is on a disk: a folder there gets its name at once, by a rename."""
    return isinstance(url_to_fs(str(where))[0], LocalFileSystem)


def names(folder: Where) -> list[str]:
    """The names in a folder; none if there is no such folder."""

    def listed(files: Any, path: str) -> list[str]:
        files.invalidate_cache()
        return [each.rstrip("/").rpartition("/")[2] for each in files.ls(path, detail=False)]

    try:
        return _tried(folder, listed)
    except FileNotFoundError:
        return []


def read(where: Where) -> bytes:
    """All of a file.

    Raises:
        StorageError: If it cannot be read now.
        CheckpointError: If it cannot be read at all.
    """
    try:
        content: bytes = _tried(where, lambda files, path: files.cat_file(path))
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error}") from error
    return content


def write(where: Where, content: Iterable[Any]) -> str:
    """Write buffers as a file, which is on the disk when this returns; return its SHA-256."""
    content = list(content)

    def written(files: Any, path: str) -> str:
        found = hashlib.sha256()
        with files.open(path, "wb") as file:
            for buffer in content:
                found.update(buffer)
                file.write(buffer)
            if isinstance(files, LocalFileSystem):
                file.flush()
                os.fsync(file.fileno())
        return found.hexdigest()

    return _tried(where, written)


def make(folder: Where) -> None:
    """Make a folder, and those above it."""
    _tried(folder, lambda files, path: files.makedirs(path, exist_ok=True))


def move(folder: Where, to: Where) -> None:
    """Give a folder another name beside its own; on a disk at once, and lasting."""

    def moved(files: Any, path: str) -> None:
        target = url_to_fs(str(to))[1]
        if not isinstance(files, LocalFileSystem):
            files.mv(path, target, recursive=True)
            return
        sync(Path(path))
        os.rename(path, target)
        sync(Path(target).parent)

    _tried(folder, moved)


def remove(folder: Where) -> None:
    """Remove a folder and all in it."""
    _tried(folder, lambda files, path: files.rm(path, recursive=True))


def _tried(where: Where, call: Callable[[Any, str], T]) -> T:
    """Call with the file system and the path there; again, if it fails in a way that may pass.

    Raises:
        StorageError: If it still fails so after the last wait.
        OSError: If it fails in another way.
    """
    for wait in (*_WAITS, None):
        try:
            return call(*url_to_fs(str(where)))
        except OSError as error:
            if error.errno in _LASTING or isinstance(error, FileNotFoundError):
                raise
            if wait is None:
                raise StorageError(f"{where}: {error}, after {len(_WAITS) + 1} tries") from error
            time.sleep(wait)
    raise AssertionError
