"""The safetensors files of a Hugging Face folder, found and read without trusting them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from halfstep.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_tensors(folder: Path) -> dict[str, tuple[torch.Tensor, Path]]:
    """All tensors of the folder with the file each came from, without ``transformer.`` in front.

    ``model.safetensors`` is taken before the index, as ``transformers`` does. The tensors may be
    views of the mapped file: copy what is to outlive it.

    Raises:
        CheckpointError: A file is missing, damaged, a pickle, or not where its index says; or two
            tensors have one name.
    """
    placed = _placed_by_index(folder / INDEX) if not (folder / WEIGHTS).exists() else {}
    files = sorted(set(placed.values())) or [_single_file(folder)]
    found: dict[str, tuple[torch.Tensor, Path]] = {}
    for file in files:
        tensors = _read_file(file)
        for name, placed_in in placed.items():
            if placed_in == file and name not in tensors:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is missing, though {INDEX} places it here"
                )
        for full_name, tensor in tensors.items():
            name = full_name.removeprefix("transformer.")
            if name in found:
                raise CheckpointError(
                    f"{file}: tensor {full_name!r} is there twice, also in {found[name][1]}"
                )
            if placed and full_name not in placed:
                raise CheckpointError(f"{file}: tensor {full_name!r} is not in {INDEX}")
            found[name] = (tensor, file)
    return found


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file by their full names."""
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing, though {INDEX} names it") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {error}") from error


def _single_file(folder: Path) -> Path:
    """``model.safetensors``, or an error that says what is there instead."""
    if (folder / WEIGHTS).exists():
        return folder / WEIGHTS
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when it is opened, and there is no "
            f"{WEIGHTS}. If you trust its source, convert it with transformers: "
            "GPT2LMHeadModel.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")


def _placed_by_index(index: Path) -> dict[str, Path]:
    """Which file holds each tensor, as the index has it; empty if there is no index."""
    if not index.exists():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        placed = dict(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for name in placed.values():
        # A name out of a file must not lead out of the folder: no separator, no leading dot.
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not a plain .safetensors file name")
    if not placed:
        raise CheckpointError(f"{index} names no tensor")
    return {tensor: index.with_name(name) for tensor, name in placed.items()}
