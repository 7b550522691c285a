"""Files of a whole: lasting before a rename makes them valid, read with care; also by URL."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from halfstep.errors import CheckpointError, StorageError

T = TypeVar("T")
Where = Path | str
"""A folder of this machine, or a URL that fsspec knows, such as ``s3://bucket/run``."""

MANIFEST = "manifest.json"
THREADS = 4
"""How many read or write a checkpoint's files; each holds one in memory, of 16 MB."""
_WAITS = (0.5, 1.0, 2.0)  # seconds before each further try
# What waiting does not change; all else, such as a full disk, may pass.
_LASTING = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EACCES,
    errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
_LASTING_KINDS = (FileNotFoundError, PermissionError, ValueError, ImportError)
# The last two: no such protocol, or a package for it is missing.


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that after a crash, or on a full disk, is the old one or all of the new one.

    Raises:
        OSError: If it cannot be written; the old one is left.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(temporary)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when a folder's files, and then their names, are on the disk; not recursive."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def read_json(where: Where) -> dict[str, Any]:
    """Read a file with one JSON object, in which no key occurs twice; or raise CheckpointError."""
    return parse_json(read_whole(where), where)


def parse_json(content: bytes, where: Where) -> dict[str, Any]:
    """Parse a file's JSON object as :func:`read_json` does."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: not a halfstep checkpoint file")
    return value


def sha256(path: Path) -> str:
    """Compute a file's SHA-256 as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, about: Mapping[str, str]) -> None:
    """Write the SHA-256 of every file of a folder beside them, for :func:`require_intact`.

    With them stands what is said ``about`` the folder.
    """
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    files = {name: {"sha256": sha256(p)} for name, p in paths.items() if name != MANIFEST}
    # without spaces, in which a flipped bit would not be noticed
    text = json.dumps({"format": 1, "files": files, **about}, separators=(",", ":"))
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def require_intact(folder: Path, besides: str = ".") -> None:
    """Refuse a folder whose files are not as its manifest says; without one of ours, it passes.

    Links are followed, as the hub's cache has them. Files that end in ``besides`` are not read.

    Raises:
        CheckpointError: Naming the file.
    """
    path, files, wrong = folder / MANIFEST, {}, ""
    if not path.is_file():
        return
    try:
        content = path.read_bytes()
        table = json.loads(content, object_pairs_hook=_unique)
        if b'"sha256"' in content:  # else it is another program's
            files = {name: entry["sha256"] for name, entry in table["files"].items()}
            wrong = "is of another format" if table["format"] != 1 else ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"is damaged ({error!r:.80})"
    for name in () if wrong else files:
        path = folder / name
        if not path.is_file():
            wrong = "is missing"
        elif not name.endswith(besides) and sha256(path) != files[name]:
            wrong = "has changed since it was written, and may be damaged"
        if wrong:
            break
    if wrong:
        raise CheckpointError(
            f"{path} {wrong}; copy it again from where it is whole. If you changed it on purpose, "
            f"remove {MANIFEST} beside it"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


# A disk or an object store, by fsspec: faults that may pass are waited out.


def below(folder: Where, name: str) -> Any:
    """The place of a file or folder in a folder, spelled as that is."""
    return folder / name if isinstance(folder, Path) else f"{folder.rstrip('/')}/{name}"


def is_local(where: Where) -> bool:
    """Whether it is on a disk: a folder there gets its name at once, by a rename."""
    return isinstance(url_to_fs(str(where))[0], LocalFileSystem)


def names_in(folder: Where) -> list[str]:
    """The names in a folder; none if there is no such folder."""

    def listed(files: Any, path: str) -> list[str]:
        files.invalidate_cache()
        if files.isfile(path):
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, where a folder is needed")
        paths = files.ls(path, detail=False) if files.isdir(path) else []
        return [each.rstrip("/").rpartition("/")[2] for each in paths]

    return _tried(folder, listed)


def read_whole(where: Where) -> bytes:
    """Read all of a file."""
    content: bytes = _tried(where, lambda files, path: files.cat_file(path))
    return content


def write_hashed(where: Where, *content: Any, lasting: bool = True) -> str:
    """Write a file of one or more parts, which lasts then, in a folder that need not exist.

    Not ``lasting``, it lasts on a disk when :func:`make_lasting` has returned.

    Returns:
        Its SHA-256 as hex digits.
    """

    def written(files: Any, path: str) -> None:
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with files.open(path, "wb") as file:
            for part in content:
                file.write(part)
        if lasting and isinstance(files, LocalFileSystem):
            sync(Path(path))

    _tried(where, written)
    sha = hashlib.sha256()
    for part in content:
        sha.update(part)
    return sha.hexdigest()


def make_lasting(where: Where, sha: str) -> None:
    """Return when a file is on the disk, or raise StorageError; ``sha`` is its SHA-256."""
    files, path = url_to_fs(str(where))
    if not isinstance(files, LocalFileSystem):
        return
    try:
        sync(Path(path))
    except OSError as error:
        # Linux takes what it failed to write for written, so that another sync would say nothing.
        if write_hashed(where, read_whole(where)) != sha:
            raise StorageError(f"{where}: {error}, and what was written is lost") from error


def move(folder: Where, to: Where) -> None:
    """Give a folder another name beside its own; on a disk at once, and lasting."""

    def moved(files: Any, path: str) -> None:
        target = url_to_fs(str(to))[1]
        if not isinstance(files, LocalFileSystem):
            files.mv(path, target, recursive=True)
            return
        if os.path.exists(path) or not os.path.exists(target):  # else an earlier try came so far
            sync(Path(path))
            os.rename(path, target)
        sync(Path(target).parent)

    _tried(folder, moved)


def remove(where: Where) -> None:
    """Remove a file, or a folder and all in it."""
    _tried(where, lambda files, path: files.rm(path, recursive=True))


def each_of(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Do work on each item, in a few threads: reading, writing and hashing use a core each."""
    begin_each(work, items)[1]()


def begin_each(
    work: Callable[[T], object], items: Iterable[T]
) -> tuple[list[Future[object]], Callable[[], None]]:
    """Begin it in other threads; return what each will be, and a function that waits for all.

    There the caller's thread takes part, from the other end, so that it is seen to be at work.
    """
    pool = ThreadPoolExecutor(THREADS - 1)
    others = [(item, pool.submit(work, item)) for item in items]

    def finish() -> None:
        try:
            for item, other in reversed(others):
                work(item) if other.cancel() else other.result()
        finally:  # after an error, what has not begun is not needed
            pool.shutdown(cancel_futures=True)

    return [other for _, other in others], finish


def _tried(where: Where, call: Callable[[Any, str], T]) -> T:
    """Call with the file system and the path there; again, if it fails in a way that may pass.

    Raises:
        StorageError: If it still fails so after the last wait.
        CheckpointError: If it fails in another way.
    """
    for wait in (*_WAITS, None):
        try:
            return call(*url_to_fs(str(where)))
        except Exception as error:  # object stores raise their clients' own kinds
            if getattr(error, "errno", None) in _LASTING or isinstance(error, _LASTING_KINDS):
                allowed = (
                    "; allowed: a folder, or a URL of fsspec with its package (s3:// with s3fs)"
                )
                known = allowed * isinstance(error, ValueError | ImportError)
                raise CheckpointError(f"{where}: {error}{known}") from error
            if wait is None:
                raise StorageError(f"{where}: {error}, after {len(_WAITS) + 1} tries") from error
            time.sleep(wait)
    raise AssertionError
