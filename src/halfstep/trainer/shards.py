"""Shards of tensors: what a rank holds of each, and its files in a checkpoint.

The files are named and laid out as ``torch.distributed.checkpoint``'s safetensors are, so that its
``HuggingFaceStorageReader`` reads the folder: it takes the offset of each box from the headers.
Beside them is an index of each rank's, which has the same, ``index-00001.json``::

    {"shard-00001-model-00001.safetensors": {"sha256": "...", "tensors": {
        "blocks.0.attention.weight": {
            "saved_offsets": [0, 0], "size": [384, 768], "shape": [768, 768],
            "dtype": "float32", "section": "weights"},
        "blocks.0.attention.weight/exp_avg": ...}}, ...}

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
from safetensors.torch import _TYPES
from torch import Tensor

from halfstep.errors import CheckpointError, NonFiniteError
from halfstep.files import Where, below, each_of, write_hashed
from halfstep.optim.state import in_dtype, tops_of
from halfstep.precision.scaling.gradients import is_finite

WEIGHTS, OPTIMIZER = SECTIONS = ("weights", "optimizer")
OLD_FORMAT = 2  # of version 0.2
_FILE = re.compile(
    r"shard-\d{5,}-model-\d{5,}\.safetensors"
    r"|state\.json|(weights|optimizer)(-\d{5,}-of-\d{5,})?\.safetensors"  # of version 0.2
)
BUCKET = 1 << 24
"""Bytes of a file, which are copied to read it, or to write it from another device than the CPU."""
_DTYPES = {dtype: name for name, dtype in _TYPES.items()}


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


class LocalShard(NamedTuple):
    """A tensor on this rank, and the shard of the whole tensor that it is."""

    section: str
    name: str
    tensor: Tensor
    shard: Shard


def write_shards(shards: Iterable[LocalShard], folder: Where, rank: int) -> dict[str, Any]:
    """Write a rank's shards, a few buckets at a time; return its index.

    When it returns the tensors may change; their files last when :func:`make_lasting` says so.

    Raises:
        NonFiniteError: At the first tensor with a NaN or inf.
        CheckpointError: If a tensor does not have its shard's shape.
        StorageError: If a file cannot be written.
    """
    buckets: list[dict[str, tuple[dict[str, Any], Tensor]]] = []
    for section, name, tensor, shard in shards:
        if tuple(tensor.shape) != shard.local:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} on this rank, its shard {shard.local} of "
                f"{shard.shape}: only tensors of a parameter's own shape can be sharded"
            )
        if tensor.is_floating_point() and not is_finite(tensor):
            raise NonFiniteError(name, cause="weights", parameters=(name,))
        about = {"dtype": str(tensor.dtype).removeprefix("torch."), "section": section}
        for offset, piece in _pieces(tensor.detach(), shard):
            held = sum(each.nbytes for _, each in buckets[-1].values()) if buckets else 0
            if not buckets or name in buckets[-1] or held + piece.nbytes > BUCKET:
                buckets.append({})
            box = {"saved_offsets": offset, "size": tuple(piece.shape), "shape": shard.shape}
            buckets[-1][name] = box | about, piece
    index: dict[str, Any] = {}

    def write(numbered: tuple[int, dict[str, tuple[dict[str, Any], Tensor]]]) -> None:
        number, bucket = numbered
        boxes = {name: box for name, (box, _) in bucket.items()}
        parts = _as_safetensors(boxes, {name: piece for name, (_, piece) in bucket.items()})
        file = f"shard-{rank + 1:05d}-model-{number:05d}.safetensors"
        sha = write_hashed(below(folder, file), *parts, lasting=False)
        index[file] = {"sha256": sha, "tensors": boxes}

    each_of(write, enumerate(buckets, 1))
    return dict(sorted(index.items()))


def _pieces(tensor: Tensor, shard: Shard) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cut a shard into rows of at most a bucket, where it is larger: the offset, and the piece."""
    if tensor.nbytes <= BUCKET:
        if shard.numel or 0 in shard.shape:
            yield shard.offset, tensor
        return
    rows = max(1, BUCKET * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), rows):
        yield (shard.offset[0] + start, *shard.offset[1:]), tensor[start : start + rows]


def _as_safetensors(boxes: dict[str, Any], pieces: Mapping[str, Tensor]) -> list[Any]:
    """A file's content in parts; what is on the CPU and contiguous is not copied.

    **Source:** https://github.com/huggingface/safetensors, "Format".
    """
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(boxes)}
    header: dict[str, Any] = {"__metadata__": about}
    ordered = sorted(pieces.items(), key=lambda each: -each[1].element_size())  # all lie aligned
    end = 0
    for name, piece in ordered:
        start, end = end, end + piece.nbytes
        dtype = _DTYPES[piece.dtype]
        header[name] = {"dtype": dtype, "shape": piece.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (piece.cpu().contiguous().view(-1).view(torch.uint8).numpy() for _, piece in ordered)
    return [len(text).to_bytes(8, "little") + text, *data]


# What any rank reads.


class Stored(NamedTuple):
    """A box of a tensor, and the file that holds it.

    ``order`` is that of 8-bit codes in checkpoints of version 0.2: their dims, slowest first.
    """

    file: str
    section: str
    name: str
    box: Shard
    dtype: torch.dtype
    order: tuple[int, ...] | None = None

    def checked(self) -> Stored:
        """Return itself, if it can be what a rank wrote; else raise ValueError."""
        ends = zip(self.box.offset, self.box.local, self.box.shape, strict=True)
        inside = all(0 <= o <= o + n <= whole for o, n, whole in ends)
        if not (inside and _FILE.fullmatch(self.file) and isinstance(self.dtype, torch.dtype)):
            raise ValueError(f"{self}")
        return self

    def values(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The box's elements, of the tensors in its file."""
        found = tensors[self.name]
        if self.order is not None:
            key = self.name.rpartition("/")[2]
            codes = found.permute([self.order.index(dim) for dim in range(found.dim())])
            coded = {key: codes, tops_of(key): tensors[tops_of(self.name)]}
            found = in_dtype(coded, torch.float32)[key]
        if tuple(found.shape) != self.box.local:
            raise ValueError(f"{self.name} has shape {tuple(found.shape)} there")
        return found


def read_index(raw: Mapping[str, Any], where: Where) -> tuple[dict[str, str], list[Stored]]:
    """Read a rank's index, or the manifest of version 0.2: SHA-256 by file, and the boxes in them.

    Raises:
        CheckpointError: If it is damaged or foreign.
    """
    try:
        old = raw.get("format") == OLD_FORMAT
        files = {name: entry["sha256"] for name, entry in (raw["files"] if old else raw).items()}
        stored = _of_manifest(raw) if old else _of_index(raw)
        return files, [each.checked() for each in stored]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged or foreign ({error!r:.200})") from error


def _of_index(raw: Mapping[str, Any]) -> Iterator[Stored]:
    for file, entry in raw.items():
        for name, e in entry["tensors"].items():
            box = Shard(_sizes(e["shape"]), _sizes(e["saved_offsets"]), _sizes(e["size"]))
            yield Stored(file, e["section"], name, box, getattr(torch, e["dtype"]))


def _of_manifest(raw: Mapping[str, Any]) -> Iterator[Stored]:
    for section in SECTIONS:
        for name, e in raw[section].items():
            shape = _sizes(e["shape"])  # without elements, no file has it
            none = {"file": f"{section}.safetensors", "offset": [0] * len(shape), "shape": shape}
            for piece in e["pieces"] or [none]:
                box = Shard(shape, _sizes(piece["offset"]), _sizes(piece["shape"]))
                order = _sizes(piece["order"]) if "order" in piece else None
                yield Stored(piece["file"], section, name, box, torch.float32, order)


def _sizes(raw: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, raw))
