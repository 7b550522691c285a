"""A folder of results is there whole and verified, or it is not there at all.

A result is built in a temporary folder beside its final place, synced to disk and renamed in one
step; whoever finds it checks it before use. A killed process leaves only a temporary folder, which
nobody ever reads and which is removed when it is a day old.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from halfstep.errors import DataError
from halfstep.files import sync, sync_folder

TEMPORARY_PREFIX = ".tmp-"
STALE_SECONDS = 24 * 60 * 60
"""Age at which a temporary folder belongs to nobody: no file in it was written for a day."""

ATTEMPTS = 4
"""Looks at a result before giving up; the second succeeds unless other processes interfere."""

T = TypeVar("T")


def cache_root(configured: str) -> Path:
    """Finds the cache folder: the configured one, else as the environment says.

    Args:
        configured: ``DataConfig.cache_dir``.

    Returns:
        The configured folder, else $HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else
        ~/.cache/halfstep. **Source:** XDG Base Directory Specification.
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

    Args:
        root: Folder of results of one kind; created if missing.
        name: A name made from everything the result depends on.
        load: Reads and verifies a result; None if it is absent or damaged.
        build: Writes a result into an empty folder.

    Returns:
        What ``load`` made of the final folder. Of several processes that build the same name at
        once, each gets the one that was renamed first.

    Raises:
        DataError: The cache cannot be written, for instance because the disk is full.
    """
    final = root / name
    for _ in range(ATTEMPTS):
        found = load(final)
        if found is not None:
            return found
        temporary = root / f"{TEMPORARY_PREFIX}{name[:16]}-{uuid.uuid4().hex}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_stale(root)
            temporary.mkdir()
            build(temporary)
            sync_folder(temporary)
            _publish(temporary, final, damaged=lambda: load(final) is None)
        except OSError as error:
            raise cannot_write(Path(error.filename or final), error) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    raise DataError(
        f"{final}: damaged again each time it was written ({ATTEMPTS} times); check the disk, or "
        f"set data.cache_dir or HALFSTEP_CACHE to another one"
    )


def cannot_write(path: Path, error: OSError, hint: str = "") -> DataError:
    """Words an operating system's refusal to write; returns the error for the caller to raise.

    Args:
        path: What was being written.
        error: The refusal. A quota and a limit on file size are full disks to the user.
        hint: More about the amount, for instance ``" (3 of about 9 bytes written)"``.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        why = f"no space left{hint}; free some"
    else:
        why = f"cannot be written: {error.strerror or error}{hint}; check the rights"
    return DataError(f"{path}: {why}, or set data.cache_dir or HALFSTEP_CACHE to another disk")


def remove_stale(root: Path) -> None:
    """Removes temporary folders that nobody wrote to for ``STALE_SECONDS``."""
    now = time.time()
    for folder in root.glob(f"{TEMPORARY_PREFIX}*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except OSError:  # another process is removing or renaming it
            continue
        if now - newest > STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _publish(temporary: Path, final: Path, damaged: Callable[[], bool]) -> None:
    """Renames a finished folder to its final name, or leaves it when a good one came first."""
    while True:
        try:
            os.rename(temporary, final)
        except OSError as error:
            # ENOTDIR: a stray file has the name. The others: a folder does (POSIX allows both).
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            sync(final.parent)
            return
        if not damaged():
            return
        _discard(final)


def _discard(path: Path) -> None:
    """Takes a damaged result out of the way by renaming, so that nobody meets half of it."""
    trash = path.parent / f"{TEMPORARY_PREFIX}trash-{uuid.uuid4().hex}"
    try:
        os.rename(path, trash)
    except FileNotFoundError:  # another process was faster
        return
    if trash.is_dir():
        shutil.rmtree(trash, ignore_errors=True)
    else:
        trash.unlink()
