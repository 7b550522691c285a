"""Files of a whole: on the disk before a rename makes them valid, and read with care."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError

MANIFEST = "manifest.json"


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


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object, in which no key occurs twice; or raise CheckpointError."""
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def parse_json(content: bytes, where: Path | str) -> dict[str, Any]:
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


def write_manifest(folder: Path) -> None:
    """Write the SHA-256 of every file of a folder beside them, for :func:`require_intact`."""
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    files = {name: {"sha256": sha256(p)} for name, p in paths.items() if name != MANIFEST}
    # without spaces, in which a flipped bit would not be noticed
    text = json.dumps({"format": 1, "files": files}, separators=(",", ":"))
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
