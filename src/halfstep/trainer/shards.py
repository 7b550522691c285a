"""Shards of tensors: what a rank holds of each, and its files in a checkpoint.

The files are named and laid out as ``torch.distributed.checkpoint``'s safetensors are, so that its
``HuggingFaceStorageReader`` reads the folder: header ``DCP_SHARDING_INFO`` has each box's offset.
Beside them is one index a rank, ``index-00001.json``::

    {"files": {"shard-00001-model-00001.safetensors": "SHA-256", ...},
     "weights": {"blocks.0.attention.weight": {
         "shape": [768, 768], "dtype": "F32",
         "parts": [["shard-00001-model-00001.safetensors", [0, 0], [384, 768]], ...]}},
     "optimizer": {"blocks.0.attention.weight/exp_avg": ...}}

It says where this rank's own boxes are; that of rank 0 names every tensor. So no rank writes or
reads a list of what all ranks hold.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import CheckpointError, NonFiniteError
from halfstep.precision.scaling.gradients import is_finite
from halfstep.trainer import old_checkpoint
from halfstep.trainer.storage import Where, below, write

WEIGHTS, OPTIMIZER = SECTIONS = ("weights", "optimizer")
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
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FILE = re.compile(
    r"shard-\d{5,}-model-\d{5,}\.safetensors"
    r"|state\.json|(weights|optimizer)(-\d{5,}-of-\d{5,})?\.safetensors"  # of version 0.2
)
BUCKET = 1 << 26
"""Bytes of a file: what a rank copies at a time to write it, and holds at a time to read it."""


@dataclass(frozen=True, slots=True)
class Shard:
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
    written: bool = field(default=True, compare=False)

    @classmethod
    def whole(cls, shape: Iterable[int], *, written: bool = True) -> Shard:
        """Make the shard that is all of a tensor of this shape."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape, written)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.local)

    @property
    def checksum(self) -> int:
        """The box's elements and their indices, summed.

        The sums of the boxes that make up a tensor are the whole's; where a box is missing, doubled
        or moved, they are not.
        """
        ends = zip(self.offset, self.local, strict=True)
        return self.numel * (1 + sum(2 * offset + size - 1 for offset, size in ends))


def shard_of(tensor: Tensor, rank: int) -> Shard:
    """Find what this rank holds of a DTensor, or of a plain tensor, which every rank holds whole.

    It writes its shard if its coordinate is 0 on every mesh axis along which the tensor is
    replicated, and the mesh contains global rank 0: where several meshes hold the tensor side by
    side (tensor parallel within data parallel), only one of them writes.
    """
    if not hasattr(tensor, "device_mesh"):
        return Shard.whole(tensor.shape, written=rank == 0)
    dtensor: Any = tensor  # duck-typed: importing the DTensor class takes as long as torch itself
    (box,) = dtensor.__create_chunk_list__()  # which torch.distributed.checkpoint asks as well
    mesh = dtensor.device_mesh
    placed = zip(dtensor.placements, mesh.get_coordinate(), strict=True)
    first = all(number == 0 or not placement.is_replicate() for placement, number in placed)
    written = first and bool((mesh.mesh == 0).any())
    return Shard(tuple(tensor.shape), tuple(box.offsets), tuple(box.sizes), written)


# What a rank writes.


class LocalShard(NamedTuple):
    """A tensor on this rank, and the shard of the whole tensor that it is."""

    section: str
    name: str
    tensor: Tensor
    shard: Shard


def write_shards(shards: Iterable[LocalShard], folder: Where, rank: int) -> dict[str, Any]:
    """Write a rank's shards, a bucket at a time; return its index.

    Raises:
        NonFiniteError: At the first tensor with a NaN or inf.
        CheckpointError: If a tensor does not have its shard's shape, or two have one name.
        StorageError: If a file cannot be written.
    """
    index: dict[str, Any] = {"files": {}, **{section: {} for section in SECTIONS}}
    bucket: dict[str, tuple[tuple[int, ...], Tensor]] = {}

    def close_bucket() -> None:
        content = _safetensors(bucket)
        index["files"][file_name()] = write(below(folder, file_name()), content)
        bucket.clear()

    def file_name() -> str:
        return f"shard-{rank + 1:05d}-model-{len(index['files']) + 1:05d}.safetensors"

    for section, name, tensor, shard in shards:
        _require_sound(name, tensor, shard, any(name in index[each] for each in SECTIONS))
        parts: list[Any] = []
        dtype = _NAMES[tensor.dtype]
        index[section][name] = {"shape": shard.shape, "dtype": dtype, "parts": parts}
        for offset, piece in _pieces(tensor.detach(), shard):
            held = sum(each.nbytes for _, each in bucket.values())
            if name in bucket or (bucket and held + piece.nbytes > BUCKET):
                close_bucket()
            bucket[name] = offset, piece.cpu()
            parts.append([file_name(), offset, tuple(piece.shape)])
    if bucket:
        close_bucket()
    return index


def _require_sound(name: str, tensor: Tensor, shard: Shard, twice: bool) -> None:
    if tuple(tensor.shape) != shard.local:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)} on this rank, its shard {shard.local} of "
            f"{shard.shape}: only tensors of a parameter's own shape can be sharded"
        )
    if twice:
        raise CheckpointError(f"{name} is the name of two tensors; rename the module")
    if tensor.is_floating_point() and not is_finite(tensor):
        raise NonFiniteError(name, cause="weights", parameters=(name,))


def _pieces(tensor: Tensor, shard: Shard) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cut a shard into rows of at most a bucket, where it is larger: the offset, and the piece."""
    if not tensor.numel():
        return
    if not tensor.dim():
        yield (), tensor
        return
    rows = max(1, BUCKET * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), rows):
        yield (shard.offset[0] + start, *shard.offset[1:]), tensor[start : start + rows]


def _safetensors(tensors: Mapping[str, tuple[tuple[int, ...], Tensor]]) -> list[Any]:
    """A file of tensors on the host, as buffers in their memory: it is not copied.

    **Source:** https://huggingface.co/docs/safetensors; the largest elements first, so that all lie
    where their size divides the place.
    """
    offsets = {name: {"saved_offsets": offset} for name, (offset, _) in tensors.items()}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header: dict[str, Any] = {"__metadata__": about}
    buffers, end = [], 0
    for name, (_, tensor) in sorted(tensors.items(), key=lambda e: -e[1][1].element_size()):
        start, end = end, end + tensor.nbytes
        place = {"shape": tensor.shape, "data_offsets": [start, end]}
        header[name] = {"dtype": _NAMES[tensor.dtype], **place}
        buffers.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *buffers]


# What any rank reads.


class Part(NamedTuple):
    """A box of a tensor, and the file that holds it.

    ``order`` is that of 8-bit codes in checkpoints of version 0.2: their dims, slowest first.
    """

    file: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, ...] | None = None


class Saved(NamedTuple):
    """A tensor in an index: its whole shape, its dtype, and the boxes that a rank wrote."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]


class Index(NamedTuple):
    """What one rank wrote: SHA-256 by file; and tensors by section and name."""

    files: dict[str, str]
    tensors: dict[str, dict[str, Saved]]


def read_index(raw: Mapping[str, Any], where: Where) -> Index:
    """Read a rank's index, which names only files of a checkpoint and boxes in their tensors.

    The manifest of version 0.2 is one, too, of a rank that wrote everything.

    Raises:
        CheckpointError: If it is damaged or foreign.
    """
    try:
        raw = old_checkpoint.as_index(raw) if raw.get("format") == old_checkpoint.FORMAT else raw
        files = {name: str(sha) for name, sha in raw["files"].items() if _FILE.fullmatch(name)}
        return Index(
            files,
            {each: {n: _saved(e, files) for n, e in raw[each].items()} for each in SECTIONS},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged or foreign ({error!r:.200})") from error


def _saved(entry: Mapping[str, Any], files: Mapping[str, str]) -> Saved:
    parts = [Part(file, *map(_sizes, box)) for file, *box in entry["parts"]]
    saved = Saved(_sizes(entry["shape"]), DTYPES[entry["dtype"]], parts)
    for part in parts:
        ends = zip(part.offset, part.size, saved.shape, strict=True)
        if part.file not in files or not all(0 <= o < o + n <= whole for o, n, whole in ends):
            raise ValueError(f"{part} of a tensor of shape {saved.shape}")
    return saved


def _sizes(raw: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, raw))
