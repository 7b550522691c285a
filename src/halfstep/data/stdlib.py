"""The standard library of the running Python is a corpus that every user already has."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from halfstep.data.sources import Source, inspect_file, unreadable
from halfstep.errors import DataError

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
"""Tests (many are not UTF-8 on purpose), what others installed, and ``ensurepip/_bundled``."""


def standard_library(folder: Path | None = None) -> tuple[Source, ...]:
    """Lists the ``.py`` files of the standard library in a shuffled order that never changes.

    The order is that of the SHA-256 of each relative path, so that the tail that becomes validation
    is a fair sample of the library and not its letters x to z.

    Args:
        folder: Where to look; None means the library of the Python that runs this.

    Returns:
        The sources, without empty files and without those that are not UTF-8.

    Raises:
        DataError: This Python has no library as source files (a zipped or frozen one).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found.extend(Path(parent, name) for name in files if name.endswith(".py"))
    ordered = sorted(found, key=lambda path: _rank(path.relative_to(folder)))
    sources = [inspect_file(path) for path in ordered if _is_text(path)]
    if not sources:
        raise DataError(
            f"{folder}: this Python carries no standard library as .py files, so there is no "
            f"default corpus; name text of your own with --data (data.train)"
        )
    return tuple(sources)


def _rank(relative: Path) -> bytes:
    return hashlib.sha256(relative.as_posix().encode("utf-8", "surrogateescape")).digest()


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise unreadable(path, error) from None
