"""Getting files onto the disk before a rename makes them valid."""

from __future__ import annotations

import os
from pathlib import Path


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
