"""One rank's part of a checkpoint: the pieces that it writes, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.files import sync
from halfstep.optim.storage.moments import BLOCK, BROKEN
from halfstep.optim.storage.state import TOPS, tops_of
from halfstep.trainer.checkpoint.index import (
    DTYPE_NAMES,
    EMPTY_CODES,
    OPTIMIZER,
    SECTIONS,
    STATE,
    WEIGHTS,
    Entry,
    Stored,
    as_json,
    shard_name,
)
from halfstep.trainer.checkpoint.pieces import Piece
from halfstep.trainer.checkpoint.reader import sha256


@dataclass(frozen=True, slots=True)
class Own:
    """A piece that this rank writes.

    Attributes:
        tensor: The piece's elements, shape ``piece.local``.
        piece: Where they belong.
        tops: For 8-bit codes: their block tops, over the codes in memory order.
    """

    tensor: Tensor
    piece: Piece
    tops: Tensor | None = None

    @property
    def order(self) -> tuple[int, ...] | None:
        """For 8-bit codes: their dims as they lie in memory, slowest first."""
        if self.tops is None:
            return None
        strides = self.tensor.stride()
        return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes.

    Attributes:
        tensors: ``"weights"`` and ``"optimizer"``, each tensor name to piece.
        state: The text of ``state.json``; rank 0's is written.
    """

    tensors: dict[str, dict[str, Own]]
    state: str

    def copied(self) -> Part:
        """The same in CPU memory of its own; returns when the copy is complete.

        Device tensors go into pinned memory, all at once; the device is waited for at the end.
        """
        devices: set[torch.device] = set()

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.device.type != "cuda":
                return tensor.to("cpu", copy=True)
            devices.add(tensor.device)
            # Strides as they are: 8-bit codes are read in memory order.
            held = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True
            )
            return held.copy_(tensor, non_blocking=True)

        tensors = {
            section: {
                name: Own(copy(own.tensor), own.piece, None if own.tops is None else copy(own.tops))
                for name, own in owned.items()
            }
            for section, owned in self.tensors.items()
        }
        for device in devices:
            torch.cuda.synchronize(device)
        return Part(tensors, self.state)

    def first_nonfinite(self) -> str:
        """The name of a tensor with a NaN or inf, empty if there is none."""
        for owned in self.tensors.values():
            for name, own in owned.items():
                if own.tensor.is_floating_point() and not bool(own.tensor.isfinite().all()):
                    return name
                if own.tops is not None and bool((own.tops == BROKEN).any()):
                    return tops_of(name)
        return ""


def own_part(
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    pieces: Mapping[str, Piece],
    rank: int,
) -> Part:
    """What a rank writes of a state.

    Args:
        weights: Parameter name to this rank's piece of it.
        optimizer: ``"NAME/KEY"`` to this rank's piece, and others, which are whole.
        state: Plain JSON values.
        pieces: Parameter name, or a whole key of ``optimizer``, to piece; a tensor without one is
            whole and written by rank 0.
        rank: This process's.

    Raises:
        CheckpointError: If a tensor does not have its piece's shape, or a dtype that no file has.
    """
    owned: dict[str, dict[str, Own]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for name, tensor in weights.items():
        piece = pieces.get(name) or Piece.whole(tensor.shape, written=rank == 0)
        if piece.written:
            owned[WEIGHTS][name] = _own(name, tensor, piece, None)
    for key, tensor in optimizer.items():
        base = key.removesuffix(TOPS)
        if base != key and base in optimizer and optimizer[base].dtype == torch.uint8:
            continue  # goes with its codes
        tops = optimizer.get(tops_of(key)) if tensor.dtype == torch.uint8 else None
        piece = _optimizer_piece(key, tensor, pieces, rank)
        if piece.written:
            owned[OPTIMIZER][key] = _own(key, tensor, piece, tops)
    return Part(owned, json.dumps(state, indent=1))


def _optimizer_piece(key: str, tensor: Tensor, pieces: Mapping[str, Piece], rank: int) -> Piece:
    whole = Piece.whole(tensor.shape, written=rank == 0)
    if key in pieces:
        return pieces[key]
    piece = pieces.get(key.rpartition("/")[0], whole)
    if tensor.dim() == 0:
        return whole
    if tuple(tensor.shape) != piece.local and piece.local == piece.shape:
        return Piece.whole(tensor.shape, written=piece.written)
    return piece


def _own(name: str, tensor: Tensor, piece: Piece, tops: Tensor | None) -> Own:
    if tuple(tensor.shape) != piece.local:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)} on this rank, its piece {piece.local} of "
            f"{piece.shape}: only tensors of a parameter's own shape can be saved in pieces"
        )
    if tensor.dtype not in DTYPE_NAMES:
        allowed = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
        raise CheckpointError(f"{name} has dtype {tensor.dtype}; a checkpoint takes {allowed}")
    if tops is not None and tuple(tops.shape) != (-(-tensor.numel() // BLOCK),):
        raise CheckpointError(
            f"{name} has {tensor.numel()} codes and block tops of shape {tuple(tops.shape)}; "
            f"one for each {BLOCK} codes is allowed: the optimizer's state is damaged"
        )
    return Own(tensor, piece, tops)


def write_part(part: Part, folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Write a rank's files, and see that they are on the disk.

    Args:
        part: What to write.
        folder: The checkpoint's, under its temporary name.
        rank: This process's; rank 0 writes ``state.json`` besides.
        size: Number of ranks that write.

    Returns:
        What the manifest must say of them, as JSON values: ``files`` and, by section, tensors.
    """
    report: dict[str, Any] = {"files": {}}
    written = []
    for section in SECTIONS:
        owned = part.tensors[section]
        path = folder / shard_name(section, rank, size)
        report[section] = {name: as_json(_entry(path.name, own)) for name, own in owned.items()}
        stored = _storable(owned)
        if stored or size == 1:
            safetensors.torch.save_file(stored, path)
            written.append(path)
    if rank == 0:
        (folder / STATE).write_text(part.state, encoding="utf-8")
        written.append(folder / STATE)
    for path in written:
        sync(path)
        report["files"][path.name] = {"sha256": sha256(path)}
    return report


def _entry(file: str, own: Own) -> Entry:
    dtype = DTYPE_NAMES[own.tensor.dtype]
    if own.tops is not None and 0 in own.piece.shape:
        dtype = EMPTY_CODES
    pieces = (Stored(file, own.piece, own.order),) if own.piece.numel else ()
    return Entry(own.piece.shape, dtype, pieces)


def _storable(owned: Mapping[str, Own]) -> dict[str, Tensor]:
    stored = {}
    for name, own in owned.items():
        if own.piece.numel == 0:
            continue
        tensor = own.tensor.detach().cpu()
        stored[name] = _alone(tensor.permute(own.order) if own.order is not None else tensor)
        if own.tops is not None:
            stored[tops_of(name)] = _alone(own.tops.detach().cpu())
    return stored


def _alone(tensor: Tensor) -> Tensor:
    """Contiguous, in a storage that no other tensor uses: safetensors refuses shared ones."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
