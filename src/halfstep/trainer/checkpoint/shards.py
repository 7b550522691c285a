"""The tensor files of a checkpoint: what a rank writes into its own, and how any rank reads all."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.files import require_plain, require_sha256, sha256, sync
from halfstep.optim.moments import BLOCK, BROKEN
from halfstep.optim.state import in_dtype, tops_of
from halfstep.precision.scaling.gradients import is_finite
from halfstep.trainer.checkpoint.index import (
    DTYPES,
    EMPTY_CODES,
    STATE,
    Entry,
    Index,
    Piece,
    Stored,
    overlap,
    shard_name,
)

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_008  # bytes; **Source:** safetensors' header limit plus its 8-byte length


@dataclass(frozen=True, slots=True)
class Own:
    """A piece that this rank writes.

    Attributes:
        name: Name of the whole tensor.
        tensor: The piece's elements, shape ``piece.local``.
        piece: Where they belong in the whole tensor.
        tops: For 8-bit codes: their block tops, for blocks of codes in memory order.

    Raises:
        CheckpointError: If the tensor does not have its piece's shape, or has a dtype that
            checkpoint files do not support.
    """

    name: str
    tensor: Tensor
    piece: Piece
    tops: Tensor | None = None

    def __post_init__(self) -> None:
        name, tensor, piece, tops = self.name, self.tensor, self.piece, self.tops
        if tuple(tensor.shape) != piece.local:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} on this rank, its piece {piece.local} of "
                f"{piece.shape}: only tensors of a parameter's own shape can be saved in pieces"
            )
        if tensor.dtype not in _DTYPE_NAMES:
            allowed = ", ".join(str(dtype) for dtype in _DTYPE_NAMES)
            raise CheckpointError(f"{name} has dtype {tensor.dtype}; a checkpoint takes {allowed}")
        if tops is not None and tuple(tops.shape) != (_blocks(tensor.numel()),):
            raise CheckpointError(
                f"{name} has {tensor.numel()} codes and block tops of shape {tuple(tops.shape)}; "
                f"one for each {BLOCK} codes is allowed: the optimizer's state is damaged"
            )

    @property
    def order(self) -> tuple[int, ...] | None:
        """For 8-bit codes: their dims in memory order, slowest first; None for other tensors."""
        if self.tops is None:
            return None
        strides = self.tensor.stride()
        return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))

    def as_json(self, file: str) -> dict[str, Any]:
        """Return the tensor's entry for the manifest, with this piece only."""
        empty_codes = self.tops is not None and 0 in self.piece.shape
        dtype = EMPTY_CODES if empty_codes else _DTYPE_NAMES[self.tensor.dtype]
        place = {"offset": [*self.piece.offset], "shape": [*self.piece.local]}
        if self.order is not None:
            place["order"] = [*self.order]
        pieces = [{"file": file, **place}] if self.piece.numel else []
        return {"shape": [*self.piece.shape], "dtype": dtype, "pieces": pieces}

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that the file stores for this piece, by their names there."""
        if not self.piece.numel:
            return {}
        tensor = self.tensor.detach().cpu()
        if self.tops is None or self.order is None:
            return {self.name: _alone(tensor)}
        return {
            self.name: _alone(tensor.permute(self.order)),
            tops_of(self.name): _alone(self.tops.detach().cpu()),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes into a checkpoint.

    Attributes:
        tensors: Its pieces, for ``"weights"`` and for ``"optimizer"``.
        state: The text of ``state.json``, which only rank 0 writes.
    """

    tensors: dict[str, list[Own]]
    state: str

    def copied(self) -> Part:
        """Copy all tensors to CPU memory; returns when the copy is complete.

        CUDA tensors are copied asynchronously into pinned memory, and synchronized at the end.
        """
        devices: set[torch.device] = set()

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.device.type != "cuda":
                return tensor.to("cpu", copy=True)
            devices.add(tensor.device)
            # Keep the strides: the blocks of 8-bit codes follow memory order.
            held = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True
            )
            return held.copy_(tensor, non_blocking=True)

        tensors = {
            section: [
                replace(
                    own, tensor=copy(own.tensor), tops=None if own.tops is None else copy(own.tops)
                )
                for own in owned
            ]
            for section, owned in self.tensors.items()
        }
        for device in devices:
            torch.cuda.synchronize(device)
        return Part(tensors, self.state)

    def first_nonfinite(self) -> str:
        """Return the name of the first tensor with a NaN or inf; empty if there is none."""
        for own in chain.from_iterable(self.tensors.values()):
            if own.tensor.is_floating_point() and not is_finite(own.tensor):
                return own.name
            if own.tops is not None and bool((own.tops == BROKEN).any()):
                return tops_of(own.name)
        return ""

    def write(self, folder: Path, rank: int, size: int) -> dict[str, Any]:
        """Write a rank's files, and sync them to the disk.

        Args:
            folder: The checkpoint's folder, under its temporary name.
            rank: This process's rank; rank 0 also writes ``state.json``.
            size: Number of ranks that write.

        Returns:
            These files' part of the manifest, as JSON values: ``files`` and, by section, tensors.
        """
        report: dict[str, Any] = {"files": {}}
        written = []
        for section, owned in self.tensors.items():
            path = folder / shard_name(section, rank, size)
            report[section] = {own.name: own.as_json(path.name) for own in owned}
            stored = {name: tensor for own in owned for name, tensor in own.stored().items()}
            if stored or size == 1:
                safetensors.torch.save_file(stored, path)
                written.append(path)
        if rank == 0:
            (folder / STATE).write_text(self.state, encoding="utf-8")
            written.append(folder / STATE)
        for path in written:
            sync(path)
            report["files"][path.name] = {"sha256": sha256(path)}
        return report


def _alone(tensor: Tensor) -> Tensor:
    """Make a tensor contiguous in a storage of its own, as safetensors refuses shared storages."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _blocks(codes: int) -> int:
    """Return the number of blocks, and so of block tops, of this many 8-bit codes."""
    return -(-codes // BLOCK)


class Reader:
    """Reads the files of a checkpoint; checks each against its SHA-256 and the index on opening."""

    def __init__(self, path: Path, index: Index, stack: ExitStack) -> None:
        """Open nothing yet; ``stack`` will close the files that are opened later."""
        self._path, self._index, self._stack = path, index, stack
        self._open: dict[str, Any] = {}
        self._held: dict[str, list[tuple[str, Entry, Stored]]] = {n: [] for n in index.files}
        for entries in index.tensors.values():
            for name, entry in entries.items():
                for stored in entry.pieces:
                    self._held[stored.file].append((name, entry, stored))

    def tensor(self, section: str, name: str, wanted: Piece | None) -> dict[str, Tensor]:
        """Read a region of a tensor into new memory.

        Args:
            section: ``"weights"`` or ``"optimizer"``.
            name: Name of the tensor.
            wanted: The region as a piece of the whole tensor; None reads all of it.

        Returns:
            Name to tensor. An 8-bit moment comes as its codes and its block tops if the region is
            exactly a piece that a rank saved; any other region of it comes decoded to fp32.

        Raises:
            CheckpointError: If a file is missing, damaged or not what the index says.
        """
        entry = self._index.tensors[section][name]
        wanted = wanted or Piece.whole(entry.shape)
        # Open, and so check, the files before allocating memory of the sizes in the index.
        parts = [
            (stored, self.open(stored.file), met)
            for stored in entry.pieces
            if wanted.numel and (met := overlap(wanted, stored.piece)) is not None
        ]
        out = torch.empty(wanted.local, dtype=torch.float32 if entry.coded else DTYPES[entry.dtype])
        for stored, file, (to, source) in parts:
            if stored.order is None:
                out[to].copy_(file.get_slice(name)[source] if source else file.get_tensor(name))
                continue
            back = [stored.order.index(dim) for dim in range(len(stored.order))]
            codes = file.get_tensor(name).clone().permute(back)
            tops = file.get_tensor(tops_of(name)).clone()
            if stored.piece.is_same_box(wanted):
                return {name: codes, tops_of(name): tops}
            key = name.rpartition("/")[2]
            values = in_dtype({key: codes, tops_of(key): tops}, torch.float32)[key]
            out[to].copy_(values[source])
        return {name: out}

    def open(self, name: str) -> Any:
        """Return one of the tensor files, opening and checking it the first time.

        Raises:
            CheckpointError: If it is missing, damaged or not what the index says.
        """
        if name not in self._open:
            path = self._path / name
            self._require_size(path)
            require_sha256(path, self._index.files[name])
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._require_as_indexed(path, file)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            self._open[name] = file
        return self._open[name]

    def _require_size(self, path: Path) -> None:
        """Refuse a file far larger than the index says, before its bytes are read and hashed.

        Smaller differences are left to the hash and the comparison of tensors, which say more.
        """
        require_plain(path)
        wanted = sum(
            DTYPES[entry.dtype].itemsize * stored.piece.numel
            + (_blocks(stored.piece.numel) if stored.order is not None else 0)
            for _, entry, stored in self._held[path.name]
        )
        size = path.lstat().st_size
        if size > wanted + _MOST_HEADER:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, its tensors in the manifest take {wanted:,}: the "
                f"file is damaged. Remove {path.parent} to go on from the checkpoint before it"
            )

    def _require_as_indexed(self, path: Path, file: Any) -> None:
        wanted: dict[str, tuple[str, list[int]]] = {}
        for name, entry, stored in self._held[path.name]:
            local = stored.piece.local
            wanted[name] = entry.dtype, [local[dim] for dim in stored.order or range(len(local))]
            if stored.order is not None:
                wanted[tops_of(name)] = "U8", [_blocks(stored.piece.numel)]
        there = {name: found for name, found in _header(file).items() if 0 not in found[1]}
        for name in sorted(set(there) | set(wanted)):
            if there.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{path}: tensor {name!r} is {_told(there.get(name))} in the file and "
                    f"{_told(wanted.get(name))} in the manifest: the checkpoint is damaged"
                )


def _header(file: Any) -> dict[str, tuple[str, list[int]]]:
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}


def _told(found: tuple[str, list[int]] | None) -> str:
    return "absent" if found is None else f"{found[0]} of shape {found[1]}"
