"""Nested values, tensors among them, as a sealed folder: safetensors, JSON, and their SHA-256.

::

    tensors.safetensors   every tensor, by number
    values.json           everything else, with the tensors' numbers where they stand
    manifest.json         the SHA-256 of both

A folder is complete under its name or not there at all. Reading one, which may come from a
stranger, unpickles, evaluates and fetches nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.files import read_json, require_plain, require_sha256, sha256, sync_folder
from halfstep.precision.masters.local_part import is_sharded

TENSORS, VALUES, MANIFEST = "tensors.safetensors", "values.json", "manifest.json"
_FORMAT = "halfstep-capture-1"
_DEEPEST = 60
"""Levels of nesting that are read; a stranger's file may hold more than Python's stack."""
_PLAIN = (str, int, bool, type(None))


def write_sealed(folder: Path, values: Mapping[str, Any]) -> None:
    """Write values into a new folder; a folder of that name is replaced.

    Raises:
        CheckpointError: If it cannot be written, or holds something that is no tensor, number,
            text, list, tuple or dict of these.
    """
    temporary = folder.parent / f".unfinished-{folder.name}"
    tensors: dict[str, Tensor] = {}
    packed = _pack(values, tensors, "")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        safetensors.torch.save_file(tensors, temporary / TENSORS)
        (temporary / VALUES).write_text(json.dumps(packed), encoding="utf-8")
        files = {name: sha256(temporary / name) for name in (TENSORS, VALUES)}
        manifest = {"format": _FORMAT, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error


def is_sealed(folder: Path) -> bool:
    """Whether a folder looks like one that :func:`write_sealed` wrote."""
    return (folder / VALUES).is_file()


def read_sealed(folder: Path) -> dict[str, Any]:
    """Read a folder's values, with tensors in new memory on the CPU.

    Raises:
        CheckpointError: If it is missing, damaged or foreign; the message names the file.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: a link, not a capture; give the folder that it leads to")
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files")
    named = isinstance(files, dict) and set(files) == {TENSORS, VALUES}
    if manifest.get("format") != _FORMAT or not named:
        raise CheckpointError(
            f"{folder / MANIFEST}: no manifest of a capture; allowed: what halfstep.Recorder wrote"
        )
    for name, expected in manifest["files"].items():
        require_sha256(folder / name, str(expected))
    require_plain(folder / TENSORS)
    try:
        tensors = safetensors.torch.load_file(folder / TENSORS)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / TENSORS}: cannot be read: {error!s:.200}") from error
    try:
        found = _unpack(read_json(folder / VALUES), tensors, 0)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{folder / VALUES}: damaged: {error!r:.200}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / VALUES}: damaged: no table of values")
    return found


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The JSON for a value, whose tensors go into ``tensors``; ``where`` is for the error."""
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str | int):  # a class of its own, such as a version or an enum
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, Mapping):
        pairs = [[k, _pack(v, tensors, f"{where}[{k!r:.40}]")] for k, v in value.items()]
        if all(type(key) in (str, int) for key, _ in pairs):
            return {"dict": pairs}
    elif isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
    raise CheckpointError(
        f"{where or 'the value'} is a {type(value).__name__}, which no capture holds; allowed: "
        "tensors, numbers, text, None, and lists, tuples and dicts of them"
    )


def _pack_tensor(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> dict[str, Any]:
    """A tensor's number, and its dims in memory order, slowest first, as 8-bit codes need them."""
    if is_sharded(tensor) or tensor.is_sparse or tensor.is_complex():
        raise CheckpointError(
            f"{where} is a sharded, sparse or complex tensor, which no capture holds; allowed: "
            "dense real tensors that this process holds whole"
        )
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    number = str(len(tensors))
    tensors[number] = tensor.detach().cpu().permute(order).contiguous().clone()
    return {"tensor": number, "order": order}


def _unpack(packed: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    """The value of its JSON; each kind is checked, as the file may come from anywhere."""
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    if type(packed) in (*_PLAIN, float):
        return packed
    kind = next(iter(packed), "")
    content = packed[kind]
    if kind == "tensor":
        order = packed["order"]
        return tensors[content].permute([order.index(dim) for dim in range(len(order))])
    if len(packed) != 1:
        raise ValueError(f"{sorted(packed)[:5]} is no value")
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if kind == "dict":
        return {_key(key): _unpack(value, tensors, depth + 1) for key, value in content}
    made: Any = {"list": list, "tuple": tuple}[kind]
    return made(_unpack(value, tensors, depth + 1) for value in content)


def _key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{key!r:.40} is no key")
    found: str | int = key
    return found
