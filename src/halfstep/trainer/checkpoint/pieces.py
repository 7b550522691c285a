"""Pieces: the box of a whole tensor that a rank holds, and which rank writes it to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from halfstep.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """A box (hyperrectangle) of a whole tensor, which may be all of it.

    Attributes:
        shape: Shape of the whole tensor.
        offset: The box's first index along each dim.
        local: Shape of the box itself; with a 0 in it, the box is empty.
        written: Whether this rank writes the box into a checkpoint. Exactly one of the ranks that
            hold the same box does.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    written: bool = True

    @classmethod
    def whole(cls, shape: Iterable[int], *, written: bool = True) -> Piece:
        """Make the piece that is all of a tensor of this shape."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape, written)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.local)

    def is_same_box(self, other: Piece) -> bool:
        """Whether both are the same part of equally shaped tensors."""
        return (self.shape, self.offset, self.local) == (other.shape, other.offset, other.local)


def piece_of(tensor: Tensor, *, rank: int) -> Piece:
    """Find the piece of a whole tensor that this rank holds.

    Args:
        tensor: A DTensor, or a plain tensor, which every rank holds whole and rank 0 writes.
        rank: This process's global rank.

    Returns:
        The piece. A rank writes it if its coordinate is 0 on every mesh axis along which the tensor
        is replicated, and its mesh contains global rank 0: where several meshes hold the tensor
        side by side (tensor parallel within data parallel), only one of them writes.

    Raises:
        CheckpointError: If the tensor is not cut into boxes, or has a placement such as Partial.
    """
    dtensor: Any = tensor  # duck-typed: importing the DTensor class takes as long as torch itself
    if not hasattr(tensor, "device_mesh"):
        return Piece.whole(tensor.shape, written=rank == 0)
    shape, mesh = tuple(tensor.shape), dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh
        return Piece(shape, (0,) * len(shape), (0,) * len(shape), written=False)
    piece = local_piece(shape, dtensor.placements, tuple(mesh.mesh.shape), coordinate)
    held = tuple(dtensor.to_local().shape)
    if piece.local != held:
        raise CheckpointError(
            f"a DTensor of shape {shape} placed {dtensor.placements} holds {held} on rank {rank}, "
            f"its placements say {piece.local}: it cannot be saved; make it by distribute_tensor, "
            "fully_shard or parallelize_module"
        )
    return replace(piece, written=piece.written and bool((mesh.mesh == 0).any()))


def local_piece(
    shape: Sequence[int],
    placements: Sequence[Any],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> Piece:
    """Find the piece that the rank at a coordinate of a mesh holds.

    ``placements``, ``sizes`` and ``coordinate`` have one entry for each mesh axis.

    Raises:
        CheckpointError: If the part is not a box, or a placement is neither Shard nor Replicate.

    Mesh axes apply from left to right. Each cuts what the axes before it left into parts as
    ``torch.chunk`` does: ceil(n / parts) elements, the last parts fewer or none. FSDP2 over tensor
    parallel cuts the same dim from right to left; its placement then has a ``split_factor``.
    """
    indices: list[Sequence[int]] = [range(n) for n in shape]
    written = True
    for placement, parts, number in zip(placements, sizes, coordinate, strict=True):
        if placement.is_replicate():
            written = written and number == 0
            continue
        factor = getattr(placement, "split_factor", None)
        if factor is None and type(placement).__name__ != "Shard":
            raise CheckpointError(
                f"a DTensor of shape {tuple(shape)} is placed {placement} on a mesh axis; a "
                "checkpoint takes Shard and Replicate: redistribute it before"
            )
        dim: int = placement.dim
        indices[dim] = (
            _chunk(indices[dim], parts, number)
            if factor is None
            else [
                index
                for part in range(factor)
                for index in _chunk(_chunk(indices[dim], factor, part), parts, number)
            ]
        )
    for found in indices:
        if found and found[-1] - found[0] + 1 != len(found):  # ascending, but with gaps
            raise CheckpointError(
                f"a DTensor of shape {tuple(shape)} placed {tuple(placements)} on a mesh of "
                f"{tuple(sizes)} is not cut into boxes: it cannot be saved; choose a layout whose "
                "sizes divide its dims"
            )
    local = tuple(len(found) for found in indices)
    return Piece(tuple(shape), tuple(f[0] if f else 0 for f in indices), local, written)


def _chunk(indices: Sequence[int], parts: int, number: int) -> Sequence[int]:
    size = -(-len(indices) // parts)
    return indices[number * size : (number + 1) * size]


Slices = tuple[slice, ...]


def overlap(a: Piece, b: Piece) -> tuple[Slices, Slices] | None:
    """Intersect two boxes of one tensor, as slices of the first and of the second; None if empty.

    Two boxes of a 0-dim tensor always overlap.
    """
    in_a, in_b = [], []
    for a0, a_size, b0, b_size in zip(a.offset, a.local, b.offset, b.local, strict=True):
        start, stop = max(a0, b0), min(a0 + a_size, b0 + b_size)
        if start >= stop:
            return None
        in_a.append(slice(start - a0, stop - a0))
        in_b.append(slice(start - b0, stop - b0))
    return tuple(in_a), tuple(in_b)


def fault(shape: Sequence[int], pieces: Sequence[Piece]) -> str:
    """Say why non-empty pieces do not cover each element of a tensor once; empty if they do."""
    for piece in pieces:
        ends = [o + n for o, n in zip(piece.offset, piece.local, strict=True)]
        if any(end > whole for end, whole in zip(ends, shape, strict=True)):
            return f"the piece of shape {piece.local} at {piece.offset} is outside {tuple(shape)}"
    if shape and pieces:  # sweep along the dim with most cuts: distant pieces cannot overlap
        dim = max(range(len(shape)), key=lambda d: len({p.offset[d] for p in pieces}))
        ordered = sorted(pieces, key=lambda p: p.offset[dim])
    else:
        dim, ordered = 0, list(pieces)
    reaching: list[Piece] = []
    for piece in ordered:
        if shape:
            start = piece.offset[dim]
            reaching = [p for p in reaching if p.offset[dim] + p.local[dim] > start]
        for other in reaching:
            if overlap(piece, other) is not None:
                return (
                    f"two pieces overlap: {piece.local} at {piece.offset}, {other.local} at "
                    f"{other.offset}"
                )
        reaching.append(piece)
    held, whole = sum(piece.numel for piece in pieces), math.prod(shape)
    return "" if held == whole else f"its pieces hold {held} of the {whole} elements"
