"""Shards of tensors: what a rank holds of each, its files in a checkpoint, and how any rank reads.

``manifest.json``, the index of a checkpoint, says which file has which shard of which tensor::

    {"format": 2,
     "files": {"weights-00001-of-00002.safetensors": {"sha256": "..."}, ..., "state.json": ...},
     "weights": {"blocks.0.attention.weight": {
         "shape": [768, 768], "dtype": "F32",
         "pieces": [{"file": "weights-00001-of-00002.safetensors",
                     "offset": [0, 0], "shape": [384, 768]}, ...]}},
     "optimizer": {"blocks.0.attention.weight/exp_avg": ...}}

A shard of 8-bit codes also has ``"order"``: its dims in memory order, slowest first, which is how
the file stores them. The tops (scales) of its blocks are in the same file, as
``NAME/exp_avg_tops``. Files are checked by the hashes in the manifest, and the manifest, which has
no hash, by what it says: it may come from anywhere.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.files import require_sha256, sha256, sync
from halfstep.optim.moments import BROKEN
from halfstep.optim.state import in_dtype, tops_of
from halfstep.precision.scaling.gradients import is_finite

FORMAT = 2
STATE = "state.json"
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
_EMPTY_CODES = "F32"  # dtype recorded for an 8-bit moment without elements, which has no tops
_FILE = re.compile(r"(weights|optimizer)(-\d{5,}-of-\d{5,})?\.safetensors")
Slices = tuple[slice, ...]


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


def overlap(a: Shard, b: Shard) -> tuple[Slices, Slices] | None:
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


def fault(shape: Sequence[int], shards: Sequence[Shard]) -> str:
    """Say why shards do not cover each element of a tensor once; empty if they do.

    Elements and sums of their indices are counted, as comparing each shard with each would take
    minutes at 1,024 ranks; no shard that is doubled or moved keeps both.
    """
    for shard in shards:
        boxes = zip(shard.offset, shard.local, shape, strict=True)
        if not all(0 <= offset < offset + size <= whole for offset, size, whole in boxes):
            return f"a shard of shape {shard.local} at {shard.offset} is not in {tuple(shape)}"
    held, whole = sum(shard.numel for shard in shards), math.prod(shape)
    if held != whole:
        return f"its shards hold {held} of the {whole} elements"
    same = sum(map(_indices, shards)) == _indices(Shard.whole(shape))
    return "" if same else "two shards overlap"


def _indices(box: Shard) -> int:
    """Twice the sum of the indices of a box's elements."""
    ends = zip(box.offset, box.local, strict=True)
    return box.numel * sum(2 * offset + size - 1 for offset, size in ends)


# What a rank writes.


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard that this rank writes.

    Attributes:
        name: Name of the whole tensor.
        tensor: The shard's elements, shape ``shard.local``.
        shard: Where they belong in the whole tensor.
        tops: For 8-bit codes: their block tops, for blocks of codes in memory order.

    Raises:
        CheckpointError: If the tensor does not have its shard's shape.
    """

    name: str
    tensor: Tensor
    shard: Shard
    tops: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if shape != self.shard.local:
            raise CheckpointError(
                f"{self.name} has shape {shape} on this rank, its shard {self.shard.local} of "
                f"{self.shard.shape}: only tensors of a parameter's own shape can be sharded"
            )

    @property
    def order(self) -> tuple[int, ...]:
        """The dims in memory order, slowest first: blocks of 8-bit codes follow it."""
        strides = self.tensor.stride()
        return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))

    def as_json(self, file: str) -> dict[str, Any]:
        """Return the tensor's entry for the manifest, with this shard only."""
        empty_codes = self.tops is not None and 0 in self.shard.shape
        dtype = _EMPTY_CODES if empty_codes else _NAMES[self.tensor.dtype]
        place = {"file": file, "offset": [*self.shard.offset], "shape": [*self.shard.local]}
        if self.tops is not None:
            place["order"] = [*self.order]
        shards = [place] if self.shard.numel else []
        return {"shape": [*self.shard.shape], "dtype": dtype, "pieces": shards}

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that the file stores for this shard, by their names there."""
        if not self.shard.numel:
            return {}
        tensor = self.tensor.detach().cpu()
        if self.tops is None:
            return {self.name: _alone(tensor)}
        tops = self.tops.detach().cpu()
        return {
            self.name: _alone(tensor.permute(self.order)),
            tops_of(self.name): _alone(tops),
        }


def first_nonfinite(tensors: Mapping[str, list[LocalShard]]) -> str:
    """Return the name of the first tensor with a NaN or inf; empty if there is none."""
    for each in chain.from_iterable(tensors.values()):
        if each.tensor.is_floating_point() and not is_finite(each.tensor):
            return each.name
        if each.tops is not None and bool((each.tops == BROKEN).any()):
            return tops_of(each.name)
    return ""


def write_shards(
    tensors: Mapping[str, list[LocalShard]], state: str, folder: Path, rank: int, size: int
) -> dict[str, Any]:
    """Write a rank's shards by section, and sync them to the disk; rank 0 writes ``state`` too.

    Returns:
        These files' part of the manifest, as JSON values: ``files`` and, by section, tensors.
    """
    report: dict[str, Any] = {"files": {}}
    written = []
    for section, shards in tensors.items():
        number = f"-{rank + 1:05d}-of-{size:05d}" if size > 1 else ""
        path = folder / f"{section}{number}.safetensors"
        report[section] = {each.name: each.as_json(path.name) for each in shards}
        stored = {name: tensor for each in shards for name, tensor in each.stored().items()}
        if stored or size == 1:
            safetensors.torch.save_file(stored, path)
            written.append(path)
    if rank == 0:
        (folder / STATE).write_text(state, encoding="utf-8")
        written.append(folder / STATE)
    for path in written:
        sync(path)
        report["files"][path.name] = {"sha256": sha256(path)}
    return report


def _alone(tensor: Tensor) -> Tensor:
    """Make a tensor contiguous in a storage of its own, as safetensors refuses shared storages."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# What any rank reads.


class SavedShard(NamedTuple):
    """A shard, the file that holds it, and for 8-bit codes the dims in memory order."""

    file: str
    shard: Shard
    order: tuple[int, ...] | None


class SavedTensor(NamedTuple):
    """A tensor in a manifest: its whole shape, its dtype as safetensors spells it, its shards."""

    shape: tuple[int, ...]
    dtype: str
    shards: list[SavedShard]


class Manifest(NamedTuple):
    """What a manifest says: file name to SHA-256; by section, tensor name to shards."""

    files: dict[str, str]
    tensors: dict[str, dict[str, SavedTensor]]


def read_manifest(raw: Mapping[str, Any], where: Path) -> Manifest:
    """Read a manifest that names only a checkpoint's files, with each element of a tensor once.

    Raises:
        CheckpointError: If it is of another format, damaged or foreign.
    """
    if raw.get("format") != FORMAT:
        found = str(raw.get("format"))[:40]
        raise CheckpointError(f"{where}: format {found!r}, this halfstep reads {FORMAT}")
    try:
        files = {name: str(entry["sha256"]) for name, entry in raw["files"].items()}
        if STATE not in files or not all(n == STATE or _FILE.fullmatch(n) for n in files):
            raise ValueError(f"its files are {sorted(files)[:8]}")
        tensors = {
            section: {name: _saved(name, entry, files) for name, entry in raw[section].items()}
            for section in SECTIONS
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: damaged or foreign ({error!r:.200}). Remove {where.parent} to go on from "
            "the checkpoint before it"
        ) from error
    return Manifest(files, tensors)


def _saved(name: str, entry: Mapping[str, Any], files: Mapping[str, str]) -> SavedTensor:
    shape, shards = _sizes(entry["shape"]), []
    for raw in entry["pieces"]:
        order = _sizes(raw["order"]) if "order" in raw else None
        if order is not None and sorted(order) != [*range(len(shape))]:
            raise ValueError(f"order {order} of {name}")
        if raw["file"] not in files:
            raise ValueError(f"file {raw['file']!r} of {name}")
        box = Shard(shape, _sizes(raw["offset"]), _sizes(raw["shape"]))
        shards.append(SavedShard(raw["file"], box, order))
    if problem := fault(shape, [saved.shard for saved in shards]):
        raise ValueError(f"{name}: {problem}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} of {name}")
    return SavedTensor(shape, entry["dtype"], shards)


def _sizes(raw: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, raw))


class Reader:
    """Reads the tensors of a checkpoint; checks each file by its SHA-256 when it is opened."""

    def __init__(self, path: Path, manifest: Manifest, stack: ExitStack) -> None:
        """Open nothing yet; ``stack`` will close the files that are opened later."""
        self._path, self._manifest, self._stack = path, manifest, stack
        self._open: dict[str, Any] = {}

    def tensor(self, section: str, name: str, wanted: Shard | None) -> dict[str, Tensor]:
        """Read a shard of a tensor, or all of it, into new memory.

        Returns:
            Name to tensor. An 8-bit moment comes as its codes and its block tops if the shard is
            exactly one that a rank saved; any other shard of it comes decoded to fp32.

        Raises:
            CheckpointError: If a file is missing, damaged or not what the manifest says.
        """
        saved = self._manifest.tensors[section][name]
        wanted = wanted or Shard.whole(saved.shape)
        # Check all parts before allocating memory of the sizes in the manifest.
        parts = [
            (part, self._checked(name, saved, part), met)
            for part in saved.shards
            if (met := overlap(wanted, part.shard)) is not None
        ]
        coded = any(part.order is not None for part in saved.shards)
        out = torch.empty(wanted.local, dtype=torch.float32 if coded else DTYPES[saved.dtype])
        for part, file, (to, source) in parts:
            if part.order is None:
                out[to].copy_(file.get_slice(name)[source] if source else file.get_tensor(name))
                continue
            back = [part.order.index(dim) for dim in range(len(part.order))]
            codes = file.get_tensor(name).clone().permute(back)
            tops = file.get_tensor(tops_of(name)).clone()
            if part.shard == wanted:
                return {name: codes, tops_of(name): tops}
            key = name.rpartition("/")[2]
            values = in_dtype({key: codes, tops_of(key): tops}, torch.float32)[key]
            out[to].copy_(values[source])
        return {name: out}

    def _checked(self, name: str, saved: SavedTensor, part: SavedShard) -> Any:
        """Open the file of a shard, and compare what it holds with what the manifest says."""
        path, local = self._path / part.file, part.shard.local
        coded = part.order is not None
        told = [saved.dtype, [local[dim] for dim in part.order or range(len(local))], coded]
        try:
            if part.file not in self._open:
                require_sha256(path, self._manifest.files[part.file])
                self._open[part.file] = self._stack.enter_context(safe_open(path, framework="pt"))
            file = self._open[part.file]
            there = file.get_slice(name)
            tops = tops_of(name) in file.keys()  # noqa: SIM118  (not a mapping)
            found = [there.get_dtype(), there.get_shape(), tops]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        if found != told:
            raise CheckpointError(
                f"{path}: {name} is {found} in the file, {told} in the manifest, which is damaged. "
                f"Remove {path.parent} to go on from the checkpoint before it"
            )
        return file
