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
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from halfstep.errors import DataError
from halfstep.files import sync, sync_folder

TEMPORARY_PREFIX = ".tmp-"
STALE_SECONDS = 24 * 60 * 60
"""Age at which a temporary folder counts as abandoned: no file in it was written for a day."""
ATTEMPTS = 4
"""Attempts to load a result; the second succeeds unless other processes interfere."""
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
    for _ in range(ATTEMPTS):
        found = load(final)
        if found is not None:
            return found
        temporary = root / f"{TEMPORARY_PREFIX}{name[:16]}-{uuid.uuid4().hex}"
        new = temporary / "new"
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_stale(root)
            new.mkdir(parents=True)
            # Out of the way by a rename, so that nobody meets half of a damaged result.
            with suppress(FileNotFoundError):
                os.rename(final, temporary / "damaged")
            build(new)
            sync_folder(new)
            _publish(new, final)
        except OSError as error:
            raise cannot_write(Path(error.filename or final), error) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    raise DataError(
        f"{final}: damaged again each time it was written ({ATTEMPTS} times); check the disk, or "
        f"set data.cache_dir or HALFSTEP_CACHE to another one"
    )


def _publish(new: Path, final: Path) -> None:
    """Renames a finished folder to its final name, unless another process was first."""
    try:
        os.rename(new, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
    else:
        sync(final.parent)


def cannot_write(path: Path, error: OSError, hint: str = "") -> DataError:
    """Makes the error for a failed write; an exceeded quota counts as a full disk."""
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
