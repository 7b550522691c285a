"""GPT-2 folders of Hugging Face, both ways: ``config.json`` and ``model.safetensors``.

Only safetensors is read. A pickle (``pytorch_model.bin``) can run code and is never opened.

Shapes: C width, H heads, D width of a head (C = H D).
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from halfstep.errors import CheckpointError
from halfstep.files import sync, sync_folder
from halfstep.models.gpt import GPT
from halfstep.models.hf_config import read_config, write_config
from halfstep.models.hf_files import WEIGHTS, read_tensors
from halfstep.models.hf_layout import IGNORED, from_hf, hf_name, hf_shape, to_hf
from halfstep.models.skeleton import own_skeleton, refuse_more_layers, require_plain_files

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_gpt2(
    folder: str | os.PathLike[str],
    *,
    dropout: float | None = None,
    activation_checkpointing: bool = False,
) -> GPT:
    """The GPT-2 of a Hugging Face folder, in fp32 on the CPU, in training mode.

    Weights of 16 bits are widened, which is exact.

    Args:
        folder: With ``config.json`` and ``model.safetensors`` (or the shards that
            ``model.safetensors.index.json`` names).
        dropout: Instead of the file's; None takes the file's.
        activation_checkpointing: See :class:`GPTConfig`.

    Raises:
        CheckpointError: A file is missing, damaged or a pickle; the network is one that our GPT is
            not (the key is named); a tensor is missing, surplus, not finite, or of wrong shape or
            dtype (file and tensor are named).
    """
    folder = Path(folder)
    require_plain_files(folder)
    config = read_config(
        folder / "config.json", dropout=dropout, activation_checkpointing=activation_checkpointing
    )
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: adapters are not loaded; merge them into the "
            "weights first (peft: merge_and_unload)"
        )
    found = read_tensors(folder)
    stored = {name: tensor for name, (tensor, _) in found.items()}
    refuse_more_layers(folder / "config.json", {"n_layer": config.n_layer}, len(stored))
    model = own_skeleton(folder, stored, lambda: GPT(config))
    state = {}
    for name, parameter in model.named_parameters():
        theirs = hf_name(name)
        if theirs not in found:
            raise CheckpointError(
                f"{folder}: tensor 'transformer.{theirs}' is in none of its files"
            )
        tensor, file = found.pop(theirs)
        _check_tensor(file, theirs, tensor, hf_shape(name, parameter))
        state[name] = from_hf(name, tensor, config.n_head)
    _check_surplus(found, state["wte.weight"])
    model.load_state_dict(state, strict=True, assign=True)
    return model


def save_gpt2(
    model: GPT, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Writes a folder that ``GPT2LMHeadModel.from_pretrained`` and :func:`load_gpt2` read.

    The folder appears complete or not at all: it is written under another name beside, synced to
    the disk, then renamed.

    Args:
        model: With all its parameters on this process (not sharded).
        folder: Must not exist, or be empty.
        dtype: Of the written weights: float32, bfloat16 or float16. None keeps the parameters'
            own (the widest of them, if they differ).

    Raises:
        CheckpointError: The folder is not empty or cannot be written; or a weight is not finite,
            in the model or after rounding to ``dtype`` (the tensor is named).
    """
    folder = Path(folder)
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; choose another name")
    if dtype is None:
        dtype = torch.bfloat16
        for i, parameter in enumerate(model.parameters()):
            dtype = torch.promote_types(dtype, parameter.dtype) if i else parameter.dtype
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = to_hf(name, parameter.detach(), model.config.n_head).to("cpu", dtype)
        theirs = f"transformer.{hf_name(name)}"
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{folder}: tensor {theirs!r} holds NaN or inf as {dtype}; nothing was written"
            )
        tensors[theirs] = tensor.contiguous()

    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        write_config(temporary / "config.json", model.config, dtype)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        # safetensors creates its file for the owner only; give it the permissions of its neighbour.
        (temporary / WEIGHTS).chmod((temporary / "config.json").stat().st_mode)
        sync_folder(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_tensor(file: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError for a tensor that cannot become a parameter without a loss."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json means {shape}"
        )
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}, allowed are {allowed}")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{file}: tensor {name!r} holds NaN or inf")


def _check_surplus(rest: dict[str, tuple[torch.Tensor, Path]], wte_VC: torch.Tensor) -> None:
    """Raises CheckpointError for tensors that our GPT has no place for."""
    for name, (tensor, file) in rest.items():
        if IGNORED.fullmatch(name):
            continue
        if name != "lm_head.weight":
            raise CheckpointError(f"{file}: tensor {name!r} has no place in halfstep's GPT")
        if tensor.shape != wte_VC.shape or not torch.equal(tensor.to(wte_VC.dtype), wte_VC):
            raise CheckpointError(
                f"{file}: lm_head.weight differs from wte.weight, but halfstep's GPT has one table "
                "for both; an untied head cannot be loaded"
            )
