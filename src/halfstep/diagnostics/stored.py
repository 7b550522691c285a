"""Where the tensors of a checkpoint lie in its files, and their bytes, some megabytes at a time.

Read are safetensors, files of ``torch.save`` and folders of ``torch.distributed.checkpoint``. No
file is mapped, as its pages would count as this process's memory, and no code in one is run.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import _TYPES
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.errors import CheckpointError
from halfstep.files import parse_json

DTYPES: dict[str, Any] = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}
"""safetensors' names of dtypes."""
_OURS = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 21  # elements read at a time
_HEADER = 1 << 27  # bytes of the longest header
_OTHER = r"training_args|scheduler|rng_?state|random_states|scaler\.|tokenizer"  # files to pass by
_BESIDE = r"adapter|optim|ema|master"  # files to read beside those of an index
_STORAGE = re.compile(rb"PK\x03\x04.{4}\0\0.{18}(..)[^/]*/data/0", re.DOTALL)
"""The header of an uncompressed tensor in a zip archive, with the length of what follows it."""


class Piece(NamedTuple):
    """Where a part of a tensor begins in the whole, and where its bytes lie."""

    begin: int
    path: Path
    offset: int
    elements: int


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in files; ``ordered`` if its pieces, one by one, are its elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]
    ordered: bool = True

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """Yield its bytes; CheckpointError if some are missing."""
        size = DTYPES[self.dtype].itemsize
        missing = math.prod(self.shape) - sum(piece.elements for piece in self.pieces)
        for begin, path, offset, elements in sorted(self.pieces):
            for start in range(0, elements, _CHUNK):
                count = min(_CHUNK, elements - start) * size
                raw = np.fromfile(path, np.uint8, count, offset=offset + start * size)
                if missing or len(raw) != count:
                    raise CheckpointError(f"{path}: {self.name} from {begin} on is incomplete")
                yield raw


@dataclass
class Folder:
    """The tensors of a checkpoint, and what JSON files beside them say."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)

    def add(self, tensor: Stored) -> None:
        """Take a tensor up, or a further box of one; another of the same name with its file's."""
        piece, known = tensor.pieces[0], self.tensors.get(tensor.name)
        if known is None:
            self.tensors[tensor.name] = tensor
        elif tensor.shape == known.shape and piece.elements < math.prod(tensor.shape):
            if all(piece.begin != each.begin for each in known.pieces):  # else a replica
                known.pieces.append(piece)
        elif piece.begin:  # a box of a whole whose shape is not told
            shape = tuple(map(max, tensor.shape, known.shape))
            pieces, ordered = [*known.pieces, piece], known.ordered and tensor.ordered
            self.tensors[tensor.name] = Stored(known.name, known.dtype, shape, pieces, ordered)
        else:
            name = f"{piece.path.stem}:{tensor.name}"
            self.tensors[name] = Stored(name, tensor.dtype, tensor.shape, tensor.pieces)


def read_folder(path: Path) -> Folder:
    """Find the tensors of a checkpoint: of a folder, or of one file.

    Raises:
        CheckpointError: If there are none, or a file is damaged or foreign; it names the file.
    """
    found = Folder(path)
    for each in path.glob("*.json"):
        if each.stem in ("config", "trainer_state", "state", "manifest"):
            with suppress(CheckpointError):  # a hint, which may be another program's
                found.said[each.stem] = parse_json(each.read_bytes(), each)
    for each in _files_of(path) if path.is_dir() else [path]:
        try:
            _read_file(found, each)
        except CheckpointError as error:
            raise CheckpointError(f"{each}: {str(error).removeprefix(f'{each}: ')}") from error
        except (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError,
                ValueError, pickle.UnpicklingError) as error:  # fmt: skip
            raise CheckpointError(
                f"{each}: damaged, or not of safetensors, torch.save or torch.distributed."
                f"checkpoint ({error!s:.80}); copy it again"
            ) from error
    inner = [each for glob in ("model/", "step-*/", "checkpoint-*/", "checkpoints/step-*/")
             for each in path.glob(glob)]  # fmt: skip
    if not found.tensors and inner:
        return read_folder(max(inner, key=lambda step: int("0" + re.sub(r"\D", "", step.name))))
    if not found.tensors:
        raise CheckpointError(
            f"{path}: holds no tensors; allowed: *.safetensors, *.bin, *.pt, *.pth, *.ckpt or "
            ".metadata, in it or in the newest checkpoint below it"
        )
    return found


def _files_of(path: Path) -> list[Path]:
    """The files of a folder that hold tensors: those of its index, if it has one, and states."""
    named: set[str] = set()
    for index in path.glob("*.index.json"):
        for name in {
            *map(str, parse_json(index.read_bytes(), index).get("weight_map", {}).values())
        }:
            if Path(name).name != name or not (path / name).is_file():
                raise CheckpointError(f"{index}: names {name:.80}, which is no file beside it")
            named.add(name)
    inside = sorted(p for p in path.iterdir() if not re.search(_OTHER, p.name))
    found = [p for p in inside if p.suffix == ".safetensors"]
    found += [p for p in inside if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
              and (named or not found or re.search(_BESIDE, p.name))]  # fmt: skip
    kept = [p for p in found if not named or p.name in named or re.search(_BESIDE, p.name)]
    return [*kept, *path.glob(".metadata"), *sorted(path.glob("*/.metadata"))]


def _read_file(found: Folder, path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(8)
        if path.name == ".metadata":
            file.seek(0)
            _read_distributed(found, path, file)
        elif head[:2] in (b"PK", b"\x80\x02"):
            _read_pickled(found, path)
        else:
            _read_safetensors(found, path, file, int.from_bytes(head, "little"))


def _box(
    name: str, dtype: str, whole: Any, starts: Any, shape: Any, path: Path, offset: int
) -> Stored:
    cut = [dim for dim, size in enumerate(shape) if size != whole[dim]]
    begin = sum(int(at) * math.prod(whole[dim + 1 :]) for dim, at in enumerate(starts))
    ordered = not cut or math.prod(shape[: cut[-1]]) == 1
    return Stored(
        name, dtype, tuple(whole), [Piece(begin, path, offset, math.prod(shape))], ordered
    )


def _read_safetensors(found: Folder, path: Path, file: BinaryIO, length: int) -> None:
    size, end = path.stat().st_size, 8 + length
    if end > size or length > _HEADER:
        raise ValueError("no header within it")
    table = parse_json(file.read(length), path)
    boxes = json.loads(table.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    for name, each in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = (8 + length + at for at in each["data_offsets"])
        shape, bits = [*map(int, each["shape"])], re.findall(r"\d+", each["dtype"] + " 8")
        count = math.prod(shape)
        if first != end or min(shape, default=0) < 0 or count * int(bits[0]) != 8 * (last - first):
            raise ValueError(f"the bytes of {name:.60} are not those of its shape")
        end = last
        starts = boxes.get(name, {}).get("saved_offsets", [0] * len(shape))
        # torch's own do not tell the whole's shape, which is what all boxes together reach to
        reach = [at + size for at, size in zip(starts, shape, strict=True)]
        whole = boxes.get(name, {}).get("shape", reach)
        if each["dtype"] in DTYPES:
            found.add(_box(name, each["dtype"], whole, starts, shape, path, first))
    if end != size:
        raise ValueError(f"it has {size:,} bytes, and should have {end:,}")


def _read_pickled(found: Folder, path: Path) -> None:
    """Add what torch.save wrote, without reading the tensors."""
    try:
        with FakeTensorMode():
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"(?:GLOBAL|global|class) (\S+)", str(error))
        what = f"holds code ({code[1]:.60}), which was not run" if code else "damaged"
        raise CheckpointError(f"{what}; only tensors are read") from error
    for name, leaf in _leaves(tree):
        if isinstance(leaf, int) and re.search(r"(^|\.)(\w+_)?steps?$", name):
            found.said.setdefault("steps", []).append(leaf)
        if not isinstance(leaf, torch.Tensor):
            continue
        at = getattr(leaf.untyped_storage(), "_checkpoint_offset", None)
        if at is None:
            raise CheckpointError("of a torch before 1.6; load it and save it again")
        whole, shape = leaf.is_contiguous(), tuple(leaf.shape)
        count = 1 + sum((n - 1) * step for n, step in zip(shape, leaf.stride(), strict=True))
        if not whole and count != leaf.numel():  # rows that are repeated, or not side by side
            shape = (count,)
        offset = at + leaf.storage_offset() * leaf.dtype.itemsize
        pieces = [Piece(0, path, offset, math.prod(shape))]
        found.add(Stored(name, _OURS[leaf.dtype], shape, pieces, whole))


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield what nested dicts and lists end in, by their keys joined with dots."""
    waiting = [("", tree)]
    for _ in range(2_000_000):  # a few lists that hold each other have more leaves than time
        if not waiting:
            return
        name, value = waiting.pop()
        if isinstance(value, dict | list | tuple):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{name}.{key}".lstrip("."), each) for key, each in inner][::-1]
        else:
            yield name, value
    raise ValueError("it holds too many values")


class _Made:
    """What a pickle would have made, of whatever class: its arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle._Unpickler):
    """Reads a pickle as data: each class in it is replaced by ours, so that nothing else is called.

    torch's unpickler of weights does not read this protocol, and C's takes memory for as many
    values as a damaged file names.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("torch", "pathlib", "collections"):
            raise CheckpointError(f"holds code ({module}.{name:.60}), which was not run")
        return type(name, (_Made,), {})


def _read_distributed(found: Folder, path: Path, file: BinaryIO) -> None:
    state = _Inert(file).load().state
    for index, place in state["storage_data"].items():
        name, at, shard = (
            index.state["fqn"],
            index.state.get("offset"),
            place.state["relative_path"],
        )
        if at is None:  # no tensor
            continue
        if Path(shard).name != shard:
            raise CheckpointError(f"names {shard:.80}, which is no file beside it")
        about = state["state_dict_metadata"][name].state
        kind = about["properties"].state
        kind = kind["dtype"] if isinstance(kind, dict) else kind[0]
        boxes = {c.state["offsets"].args: c.state["sizes"].args[0] for c in about["chunks"]}
        start = place.state["offset"]
        with (path.parent / shard).open("rb") as item:  # holds files of torch.save, of one tensor
            item.seek(start)
            head = _STORAGE.search(item.read(min(place.state["length"], 1 << 14)))
        if head is None:
            raise ValueError(f"{name:.60} is not in {shard}")
        offset = start + head.end() + int.from_bytes(head[1], "little")
        dtype, whole = _OURS[getattr(torch, kind.__name__)], about["size"].args[0]
        found.add(_box(name, dtype, whole, at.args[0], boxes[at.args], path.parent / shard, offset))
