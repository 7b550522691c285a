"""Reading what is wanted of a checkpoint's tensors, from files that were checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.optim.storage.moments import BLOCK
from halfstep.optim.storage.state import TOPS, in_dtype, tops_of
from halfstep.trainer.checkpoint.index import (
    DTYPES,
    EMPTY_CODES,
    SECTIONS,
    STATE,
    Entry,
    Index,
    Stored,
    checked_files,
    require_plain,
)
from halfstep.trainer.checkpoint.pieces import Piece, overlap

_MOST_HEADER = 100_000_008  # bytes; **Source:** safetensors' own limit, and its length's 8 bytes
_PART = 16 << 20  # bytes; the interpreter is free for others while one is hashed


class Reader:
    """An open checkpoint; a file is checked against its SHA-256 and the index at its first use.

    Use as a context manager, and in it :meth:`tensor`.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self._path = path
        self._index = index
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self._held: dict[str, list[tuple[str, Entry, Stored]]] = {n: [] for n in index.files}
        for entries in index.tensors.values():
            for name, entry in entries.items():
                for stored in entry.pieces:
                    self._held[stored.file].append((name, entry, stored))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def open_all(self) -> None:
        """Open and check every file of the checkpoint but the state's."""
        for name in self._index.files:
            if name != STATE:
                self._file(name)

    def tensor(self, section: str, name: str, wanted: Piece | None) -> dict[str, Tensor]:
        """A region of a tensor, in memory of its own.

        Args:
            section: ``"weights"`` or ``"optimizer"``.
            name: The tensor's.
            wanted: The region, of the tensor's own shape; None is all of it.

        Returns:
            Name to tensor. An 8-bit moment comes as its codes and, beside them, its block tops
            where the region is one that a rank saved; of any other region it comes decoded, fp32.

        Raises:
            CheckpointError: If a file is missing, damaged or not what the index says.
        """
        entry = self._index.tensors[section][name]
        wanted = wanted or Piece.whole(entry.shape)
        # Open, and so check, before memory of the index's sizes is taken.
        parts = [
            (stored, self._file(stored.file), met)
            for stored in entry.pieces
            if wanted.numel and (met := overlap(wanted, stored.piece)) is not None
        ]
        if not entry.coded:
            out = torch.empty(wanted.local, dtype=DTYPES[entry.dtype])
            for _, file, (to, source) in parts:
                part = file.get_slice(name)[source] if source else file.get_tensor(name)
                out[to].copy_(part)
            return {name: out}
        key = name.rpartition("/")[2]
        decoded = torch.empty(wanted.local, dtype=torch.float32)
        for stored, file, (to, source) in parts:
            assert stored.order is not None
            back = [stored.order.index(dim) for dim in range(len(stored.order))]
            codes = file.get_tensor(name).clone().permute(back)
            tops = file.get_tensor(tops_of(name)).clone()
            if stored.piece.is_same_box(wanted):
                return {name: codes, tops_of(name): tops}
            values = in_dtype({key: codes, tops_of(key): tops}, torch.float32)[key]
            decoded[to].copy_(values[source])
        return {name: decoded}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._path / name
            self._require_size(path, self._held[name])
            require_sha256(path, self._index.files[name])
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._require_as_indexed(path, file, self._held[name])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            self._open[name] = file
        return self._open[name]

    def _require_size(self, path: Path, held: list[tuple[str, Entry, Stored]]) -> None:
        """Refuse a file far too large to be the index's, before its bytes are read and hashed.

        Smaller differences are left to the hash and to the names of tensors, which tell more.
        """
        require_plain(path)
        wanted = sum(
            DTYPES[entry.dtype].itemsize * stored.piece.numel
            + (-(-stored.piece.numel // BLOCK) if stored.order is not None else 0)
            for _, entry, stored in held
        )
        size = path.lstat().st_size
        if size > wanted + _MOST_HEADER:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, its tensors in the manifest take {wanted:,}: the "
                f"file is damaged. Remove {path.parent} to go on from the checkpoint before it"
            )

    def _require_as_indexed(
        self, path: Path, file: Any, held: list[tuple[str, Entry, Stored]]
    ) -> None:
        wanted: dict[str, tuple[str, list[int]]] = {}
        for name, entry, stored in held:
            local = stored.piece.local
            shape = [local[dim] for dim in stored.order or range(len(local))]
            wanted[name] = entry.dtype, shape
            if stored.order is not None:
                wanted[tops_of(name)] = "U8", [-(-stored.piece.numel // BLOCK)]
        there = {name: found for name, found in _header(file).items() if 0 not in found[1]}
        for name in sorted(set(there) | set(wanted)):
            if there.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{path}: tensor {name!r} is {_told(there.get(name))} in the file and "
                    f"{_told(wanted.get(name))} in the manifest: the checkpoint is damaged"
                )


def _header(file: Any) -> dict[str, tuple[str, list[int]]]:
    found = {}
    for name in file.keys():  # noqa: SIM118  (not a mapping)
        part = file.get_slice(name)
        found[name] = part.get_dtype(), part.get_shape()
    return found


def _told(found: tuple[str, list[int]] | None) -> str:
    return "absent" if found is None else f"{found[0]} of shape {found[1]}"


def first_format_index(raw: dict[str, Any], where: Path) -> Index:
    """The index of a checkpoint of format 1, whose files themselves say what is in them.

    Raises:
        CheckpointError: If a file is missing or damaged, or the manifest is none.
    """
    files = checked_files(raw.get("files"), where)
    names = {section: f"{section}.safetensors" for section in SECTIONS}
    if set(raw) != {"format", "files"} or set(files) != {STATE, *names.values()}:
        raise CheckpointError(f"{where}: not a halfstep checkpoint manifest")
    tensors: dict[str, dict[str, Entry]] = {}
    for section, file in names.items():
        require_sha256(where.parent / file, files[file])
        try:
            with safe_open(where.parent / file, framework="pt") as opened:
                tensors[section] = dict(_entries(_header(opened), where.parent / file))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{where.parent / file}: cannot be read: {error}") from error
    return Index(files, tensors)


def _entries(header: dict[str, tuple[str, list[int]]], path: Path) -> Iterator[tuple[str, Entry]]:
    for name, (dtype, size) in header.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {dtype}; allowed: {', '.join(DTYPES)}"
            )
        if name.endswith(TOPS) and header.get(name.removesuffix(TOPS), ("",))[0] == "U8":
            continue
        shape = tuple(size)
        coded = dtype == "U8" and tops_of(name) in header
        if 0 in shape:
            yield name, Entry(shape, EMPTY_CODES if coded else dtype, ())
        else:
            order = tuple(range(len(shape))) if coded else None
            yield name, Entry(shape, dtype, (Stored(path.name, Piece.whole(shape), order),))


def require_sha256(path: Path, expected: str) -> None:
    """Refuse a file that is not what the manifest was written for.

    Raises:
        CheckpointError: Naming the file.
    """
    require_plain(path)
    try:
        actual = sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if actual != expected:
        raise CheckpointError(
            f"{path}: contents do not match the manifest: the file is damaged. Remove "
            f"{path.parent} to go on from the checkpoint before it"
        )


def sha256(path: Path) -> str:
    """A file's SHA-256 as hex digits."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_PART, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
