"""The index of a checkpoint: which file holds which piece of which tensor.

``manifest.json``::

    {"format": 2,
     "files": {"weights-00001-of-00002.safetensors": {"sha256": "..."}, ..., "state.json": ...},
     "weights": {"blocks.0.attention.weight": {
         "shape": [768, 768], "dtype": "F32",
         "pieces": [{"file": "weights-00001-of-00002.safetensors",
                     "offset": [0, 0], "shape": [384, 768]}, ...]}},
     "optimizer": {"blocks.0.attention.weight/exp_avg": ...}}

A piece of 8-bit codes also has ``"order"``: its dims in memory order, slowest first, which is how
the file stores them. The tops (scales) of its blocks are in the same file, as
``NAME/exp_avg_tops``. A manifest is untrusted input: one not exactly of this form is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
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


FORMAT = 2
STATE = "state.json"
MANIFEST = "manifest.json"
WEIGHTS = "weights"
OPTIMIZER = "optimizer"
SECTIONS = (WEIGHTS, OPTIMIZER)
# Dtypes by the names that safetensors uses.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
EMPTY_CODES = "F32"  # dtype recorded for an 8-bit moment without elements, which has no tops
_SHARD = re.compile(r"(weights|optimizer)(-(\d{5,})-of-(\d{5,}))?\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 2**63 - 1  # largest size in torch and safetensors


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece and the file that stores it.

    Attributes:
        file: Name of the file within the checkpoint.
        piece: The box of the whole tensor.
        order: For 8-bit codes, the dims in memory order; None for any other tensor.
    """

    file: str
    piece: Piece
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the index: its whole shape, its dtype in safetensors' spelling, its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Stored, ...]

    @property
    def coded(self) -> bool:
        """Whether the tensor is an 8-bit moment, which has block tops."""
        return any(stored.order is not None for stored in self.pieces)


@dataclass(frozen=True, slots=True)
class Index:
    """A validated manifest.

    Attributes:
        files: File name to SHA-256.
        tensors: For ``"weights"`` and ``"optimizer"``, tensor name to entry.
    """

    files: dict[str, str]
    tensors: dict[str, dict[str, Entry]]


def shard_name(section: str, rank: int, size: int) -> str:
    """Return the name of a rank's file of tensors; it has no numbers where there is one rank."""
    return f"{section}{f'-{rank + 1:05d}-of-{size:05d}' if size > 1 else ''}.safetensors"


def check_index(raw: dict[str, Any], where: Path) -> Index:
    """Validate a manifest of the current format completely.

    Args:
        raw: The manifest, from :func:`read_json`.
        where: Its path, for messages.

    Raises:
        CheckpointError: Naming the file and the tensor.
    """
    _keys(raw, {"format", "files", *SECTIONS}, f"{where}: not a halfstep checkpoint manifest")
    files = _checked_files(raw["files"], where)
    tensors: dict[str, dict[str, Entry]] = {}
    for section in SECTIONS:
        entries = raw[section]
        if not isinstance(entries, dict):
            raise CheckpointError(f"{where}: {section!r} is not a table; {_advice(where)}")
        tensors[section] = {
            name: _entry(entry, section, files, f"{where}: tensor {name!r} of {section}")
            for name, entry in entries.items()
        }
    return Index(files, tensors)


def _checked_files(raw: Any, where: Path) -> dict[str, str]:
    """Validate the table of files, name to SHA-256; only names of a checkpoint are allowed.

    Raises:
        CheckpointError: Naming the file.
    """
    if not isinstance(raw, dict) or STATE not in raw:
        raise CheckpointError(f"{where}: not a halfstep checkpoint manifest: no {STATE} in it")
    for name, value in raw.items():
        if name != STATE and not _SHARD.fullmatch(name):
            raise CheckpointError(
                f"{where}: names a file {name!r}; allowed: {STATE}, weights.safetensors, "
                f"weights-00001-of-00002.safetensors and the same of optimizer; {_advice(where)}"
            )
        _keys(value, {"sha256"}, f"{where}: file {name!r}")
        if not isinstance(value["sha256"], str) or not _SHA256.fullmatch(value["sha256"]):
            raise CheckpointError(f"{where}: file {name!r} has no SHA-256; {_advice(where)}")
    return {name: value["sha256"] for name, value in raw.items()}


def _entry(raw: Any, section: str, files: Collection[str], what: str) -> Entry:
    _keys(raw, {"shape", "dtype", "pieces"}, what)
    shape = _sizes(raw["shape"], None, f"{what}: shape")
    if not isinstance(raw["dtype"], str) or raw["dtype"] not in DTYPES:
        raise CheckpointError(f"{what}: dtype {raw['dtype']!r}; allowed: {', '.join(DTYPES)}")
    if not isinstance(raw["pieces"], list):
        raise CheckpointError(f"{what}: its pieces are not a list: the manifest is damaged")
    pieces = tuple(
        _piece(part, shape, section, files, f"{what}, piece {number}")
        for number, part in enumerate(raw["pieces"])
    )
    used = [stored.file for stored in pieces]
    problem = fault(shape, [stored.piece for stored in pieces])
    if len(set(used)) != len(used):
        problem = "two of its pieces are in one file"
    if len({stored.order is None for stored in pieces}) > 1:
        problem = "some pieces are 8-bit codes with block tops, some are not"
    entry = Entry(shape, raw["dtype"], pieces)
    if entry.coded and (section != OPTIMIZER or raw["dtype"] != "U8"):
        problem = f"block tops at {raw['dtype']} of {section}; only 8-bit moments (U8) have some"
    if problem:
        raise CheckpointError(f"{what}: {problem}: the checkpoint is not whole or damaged")
    return entry


def _piece(
    raw: Any, shape: tuple[int, ...], section: str, files: Collection[str], what: str
) -> Stored:
    wanted = {"file", "offset", "shape"}
    coded = isinstance(raw, dict) and "order" in raw
    _keys(raw, wanted | {"order"} if coded else wanted, what)
    file = raw["file"]
    if not isinstance(file, str) or file not in files or not file.startswith(section):
        raise CheckpointError(
            f"{what}: is said to be in file {file!r}, which is no {section} file of the manifest"
        )
    piece = Piece(
        shape,
        _sizes(raw["offset"], len(shape), f"{what}: offset"),
        _sizes(raw["shape"], len(shape), f"{what}: shape"),
    )
    if 0 in piece.local:
        raise CheckpointError(f"{what}: is empty; a checkpoint has no empty pieces")
    order = _sizes(raw["order"], len(shape), f"{what}: order") if coded else None
    if order is not None and sorted(order) != list(range(len(shape))):
        raise CheckpointError(f"{what}: order {order} is not each dim of {shape} once")
    return Stored(file, piece, order)


def _sizes(raw: Any, count: int | None, what: str) -> tuple[int, ...]:
    if (
        not isinstance(raw, list)
        or not all(type(n) is int and 0 <= n <= _MOST for n in raw)
        or count not in (None, len(raw))
    ):
        count_text = "" if count is None else f"{count} "
        raise CheckpointError(
            f"{what}: {str(raw)[:80]!r}; allowed: {count_text}integers from 0 to 2^63 - 1"
        )
    return tuple(raw)


def _keys(raw: Any, wanted: set[str], what: str) -> None:
    if not isinstance(raw, dict) or set(raw) != wanted:
        found = sorted(raw)[:8] if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(
            f"{what}: has {found}, a manifest has {sorted(wanted)} there: it is damaged or foreign"
        )


def _advice(where: Path) -> str:
    return f"the manifest is damaged or foreign. Remove {where.parent} to go on from the one before"
