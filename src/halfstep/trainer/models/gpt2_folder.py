"""Reads and writes Hugging Face GPT-2 folders: ``config.json`` and ``model.safetensors``.

``transformers`` is not used, as importing it would take most of the time of a short generation.

Besides the names, two things differ: their ``Conv1D`` weights are ``(in, out)`` where ours are
``(out, in)``, and their fused attention projection orders its outputs (q|k|v, head, D) where ours
orders (head, q|k|v, D) (see :class:`~halfstep.trainer.models.gpt.CausalSelfAttention`).

Shapes: C width, H heads, D width of a head (C = H D).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halfstep.errors import CheckpointError
from halfstep.trainer.models.gpt import GPT
from halfstep.trainer.models.pretrained import (
    WEIGHTS,
    new_folder,
    read_tensors,
    require_finite,
)
from halfstep.trainer.models.shapes import GPTConfig

_KEYS: dict[str, tuple[str, Any]] = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "n_positions": ("block_size", 1024),
    "vocab_size": ("vocab_size", 50257),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
    "attn_pdrop": ("dropout", 0.1),
}
"""Key of ``config.json`` to the field of GPTConfig and the value that a missing key means.

**Source:** ``transformers.GPT2Config``, the same since version 2.
"""
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Keys that change the function which the network computes, and the values that GPT implements.

A missing key means the first value, which is GPT2Config's default. gelu_pytorch_tanh is another
name for the same tanh formula.
"""
_PARTS = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
"""Names of a block's modules, ours to theirs."""
_CONV1D = re.compile(r"layers\.\d+\.(attn|mlp)\.\w+\.weight")
_MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""Names of causal masks, which old files hold as buffers; they carry no information."""


def load_gpt2(folder: str | os.PathLike[str]) -> GPT:
    """Load the GPT-2 of a Hugging Face folder, in fp32 on the CPU, in training mode.

    16-bit weights are widened, which is exact.

    Raises:
        CheckpointError: If a file is missing, damaged or a pickle; if :class:`GPT` cannot compute
            this network; or if a tensor is missing, surplus, not finite, or of another shape.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    found = {name.removeprefix("transformer."): t for name, t in read_tensors(folder).items()}
    with torch.device("meta"):
        model = GPT(config)
    state = {}
    for name, parameter in model.named_parameters():
        tensor = found.pop(hf_name(name), None)
        shape = tuple(parameter.shape)[:: -1 if _CONV1D.fullmatch(name) else 1]
        if tensor is None or tuple(tensor.shape) != shape or not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{folder}: tensor {hf_name(name)!r} is missing, not finite, or of another shape "
                f"than {shape}, which config.json means"
            )
        state[name] = from_hf(name, tensor, config.n_head)
    head = found.pop("lm_head.weight", state["wte.weight"])
    surplus = [name for name in found if not _MASKS.fullmatch(name)]
    if surplus or not torch.equal(head.float(), state["wte.weight"]):
        raise CheckpointError(
            f"{folder}: tensor {(*surplus, 'lm_head.weight')[0]!r} has no place in halfstep's GPT, "
            "whose head is its token table"
        )
    model.load_state_dict(state, strict=True, assign=True)
    return model


def save_gpt2(
    model: GPT, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> None:
    """Write a folder that ``GPT2LMHeadModel.from_pretrained`` and :func:`load_gpt2` read.

    The folder must not exist, or be empty; it appears complete or not at all.

    Raises:
        CheckpointError: If the folder cannot be written, or a weight is not finite in ``dtype``.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        theirs = f"transformer.{hf_name(name)}"
        tensor = to_hf(name, parameter.detach(), model.config.n_head).to("cpu", dtype)
        require_finite(tensor, Path(folder), theirs)
        tensors[theirs] = tensor.contiguous()
    with new_folder(Path(folder)) as temporary:
        write_gpt2_config(temporary / "config.json", model.config, dtype)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})


def _read_config(file: Path) -> GPTConfig:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for key, allowed in _ONLY.items():
            if found.get(key, allowed[0]) not in allowed:
                raise CheckpointError(
                    f"{file}: {key} is {found[key]!r}, but halfstep's GPT has only {allowed[0]!r}; "
                    "train such a model with transformers and halfstep.Precision"
                )
        return GPTConfig(
            **{ours: found.get(key, default) for key, (ours, default) in _KEYS.items()}
        )
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read as GPT-2's: {error}") from error


def write_gpt2_config(file: Path, config: GPTConfig, dtype: torch.dtype) -> None:
    """Write what ``transformers`` needs to build the same network, with weights of this dtype."""
    # Only GPT-2's vocabulary has <|endoftext|> at 50256; by default, transformers assumes it there.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    content = {
        "architectures": ["GPT2LMHeadModel"],
        **{key: getattr(config, ours) for key, (ours, _) in _KEYS.items()},
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": str(dtype).removeprefix("torch."),
        **{key: allowed[0] for key, allowed in _ONLY.items()},
    }
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def hf_name(name: str) -> str:
    """Translate our name of a parameter to theirs, without the prefix ``transformer.``."""
    if name.startswith("layers."):
        _, i, rest = name.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        return f"h.{i}.{_PARTS[module]}.{leaf}"
    return name.replace("final_norm.", "ln_f.")


def from_hf(name: str, tensor: torch.Tensor, n_head: int) -> torch.Tensor:
    """Convert their tensor of our parameter ``name`` to a contiguous fp32 copy in our layout."""
    if _CONV1D.fullmatch(name):
        tensor = tensor.t()
    if ".qkv." in name:
        tensor = torch.unflatten(tensor, 0, (3, n_head, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def to_hf(name: str, parameter: torch.Tensor, n_head: int) -> torch.Tensor:
    """Convert our parameter to their layout, same dtype, maybe as a view; inverts `from_hf`."""
    if ".qkv." in name:
        parameter = torch.unflatten(parameter, 0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return parameter.t() if _CONV1D.fullmatch(name) else parameter
