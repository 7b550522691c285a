"""Getting files onto the disk before a rename makes them valid."""

from __future__ import annotations

import os
from pathlib import Path


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
