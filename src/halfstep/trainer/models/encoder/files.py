"""Folders of an encoder from scratch: ``config.json`` and ``model.safetensors``, both ways.

Nothing is unpickled. The tokenizer lies beside them and is read by its own room.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.encoder.config import EncoderConfig
from halfstep.trainer.models.pretrained.hf_files import WEIGHTS, read_tensors

CONFIG = "config.json"
MODEL_TYPE = "halfstep-encoder"
"""Tells these folders from those of Hugging Face models."""


def is_encoder_folder(folder: Path) -> bool:
    """Whether the folder's ``config.json`` says that it is an encoder of ours."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("model_type") == MODEL_TYPE


def read_encoder_config(folder: Path) -> EncoderConfig:
    """The config of a saved encoder.

    Raises:
        CheckpointError: ``config.json`` is missing, damaged or of another model.
    """
    file = folder / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} does not exist: an encoder's folder has {CONFIG} and {WEIGHTS}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(found).__name__}")
    if found.pop("model_type", None) != MODEL_TYPE:
        raise CheckpointError(f"{file}: model_type is not {MODEL_TYPE!r}; it is another model's")
    names = {field.name for field in dataclasses.fields(EncoderConfig)}
    differing = sorted(names ^ set(found))
    if differing:
        what = "missing" if differing[0] in names else "unknown"
        raise CheckpointError(
            f"{file}: {differing[0]} is {what}; was it written by another version of halfstep?"
        )
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
    }
    try:
        return EncoderConfig(**values)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error


def read_encoder_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The fp32 weights of a saved encoder, copied into memory.

    Args:
        folder: Of the encoder.
        shapes: Shape of every parameter by name.

    Raises:
        CheckpointError: The file is missing or damaged, or its tensors are not these.
    """
    found = read_tensors(folder)
    weights = {name: tensor for name, (tensor, _) in found.items()}
    _check(folder / WEIGHTS, shapes, weights)
    return {name: tensor.clone() for name, tensor in weights.items()}


def save_encoder(
    folder: Path,
    config: EncoderConfig,
    shapes: Mapping[str, torch.Size],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Writes ``config.json`` and ``model.safetensors``.

    Args:
        folder: Made if it is missing. To make it appear complete or not at all, give a temporary
            one, sync it and rename it.
        config: Of the encoder.
        shapes: Shape of every parameter by name.
        weights: fp32, by the same names.

    Raises:
        CheckpointError: The weights are not those of the model, one is not finite, or the folder
            cannot be written.
    """
    _check(folder / WEIGHTS, shapes, weights)
    tensors = {name: weights[name].detach().cpu().contiguous() for name in shapes}
    content = {"model_type": MODEL_TYPE, **dataclasses.asdict(config)}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(text, encoding="utf-8")
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        # safetensors creates its file for the owner only; give it the permissions of its neighbour.
        (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _check(
    file: Path, shapes: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]
) -> None:
    """Raises CheckpointError unless the weights are finite fp32 of exactly these shapes."""
    for name in (*shapes, *weights):
        if name not in weights:
            raise CheckpointError(f"{file}: tensor {name!r} is missing")
        if name not in shapes:
            raise CheckpointError(f"{file}: tensor {name!r} has no place in this encoder")
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, {CONFIG} means "
                f"{tuple(shapes[name])}"
            )
        if tensor.dtype != torch.float32:
            raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}, must be float32")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{file}: tensor {name!r} holds NaN or inf")
