"""Reads and writes Hugging Face GPT-2 folders: ``config.json`` and ``model.safetensors``.

Only safetensors files are read: a pickle (``pytorch_model.bin``) can run code and is never opened.
``transformers`` is not used, as importing it would take most of the time of a short generation.

Shapes: C width, H heads, D width of a head (C = H D).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.pretrained.folder import (
    ADAPTER,
    WEIGHTS,
    read_json_object,
    read_tensors,
)
from halfstep.trainer.models.pretrained.hub import require_plain_files
from halfstep.trainer.models.pretrained.weights import new_folder
from halfstep.trainer.models.shapes import GPTConfig

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_gpt2(
    folder: str | os.PathLike[str],
    *,
    dropout: float | None = None,
    activation_checkpointing: bool = False,
) -> GPT:
    """Load the GPT-2 of a Hugging Face folder, in fp32 on the CPU, in training mode.

    16-bit weights are widened, which is exact.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors`` (or the shards that
            ``model.safetensors.index.json`` names).
        dropout: Replaces the file's dropout; None keeps it.
        activation_checkpointing: See :class:`GPTConfig`.

    Raises:
        CheckpointError: If a file is missing, damaged or a pickle; if :class:`GPT` cannot compute
            this network (the message names the key); or if a tensor is missing, surplus, not
            finite, or of wrong shape or dtype (the message names file and tensor).
    """
    folder = Path(folder)
    require_plain_files(folder)
    config = read_config(
        folder / "config.json", dropout=dropout, activation_checkpointing=activation_checkpointing
    )
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder / ADAPTER}: adapters are not loaded; merge them into the weights first "
            "(peft: merge_and_unload)"
        )
    found: dict[str, torch.Tensor] = {}
    for full_name, tensor in read_tensors(folder).items():
        name = full_name.removeprefix("transformer.")
        if name in found:
            raise CheckpointError(f"{folder}: tensor {full_name!r} is there twice")
        found[name] = tensor
    # Check a few shapes before building, as config.json may claim a far larger model.
    last = f"h.{config.n_layer - 1}.ln_1.weight" if config.n_layer < 10**6 else "(too many layers)"
    tables = {"wte.weight": config.vocab_size, "wpe.weight": config.block_size}
    for name, rows in tables.items():
        _checked(folder, name, found, (rows, config.n_embd))
    _checked(folder, last, found, (config.n_embd,))
    with torch.device("meta"):
        model = GPT(config)
    state = {}
    for name, parameter in model.named_parameters():
        theirs = hf_name(name)
        tensor = _checked(folder, theirs, found, hf_shape(name, parameter))
        state[name] = from_hf(name, tensor, config.n_head)
        del found[theirs]
    head = found.pop("lm_head.weight", state["wte.weight"])
    if not torch.equal(head.float(), state["wte.weight"]):
        raise CheckpointError(
            f"{folder}: lm_head.weight differs from wte.weight, but halfstep's GPT has one table "
            "for both; an untied head cannot be loaded"
        )
    surplus = [name for name in found if not IGNORED.fullmatch(name)]
    if surplus:
        raise CheckpointError(f"{folder}: tensor {surplus[0]!r} has no place in halfstep's GPT")
    model.load_state_dict(state, strict=True, assign=True)
    return model


def save_gpt2(
    model: GPT, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> None:
    """Write a folder that ``GPT2LMHeadModel.from_pretrained`` and :func:`load_gpt2` read.

    The folder appears complete or not at all: it is written under another name, synced to the disk,
    then renamed.

    Args:
        model: The model, with all its parameters in this process (not sharded).
        folder: Must not exist, or be empty.
        dtype: Dtype of the written weights: float32, bfloat16 or float16.

    Raises:
        CheckpointError: If the folder is not empty or cannot be written, or if a weight is not
            finite, in the model or after rounding to ``dtype`` (the message names the tensor).
    """
    folder = Path(folder)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = to_hf(name, parameter.detach(), model.config.n_head).to("cpu", dtype)
        theirs = f"transformer.{hf_name(name)}"
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{folder}: tensor {theirs!r} holds NaN or inf as {dtype}; nothing was written"
            )
        tensors[theirs] = tensor.contiguous()

    with new_folder(folder) as temporary:
        write_gpt2_config(temporary / "config.json", model.config, dtype)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        # safetensors makes its file readable by the owner only; copy config.json's permissions.
        (temporary / WEIGHTS).chmod((temporary / "config.json").stat().st_mode)


def _checked(
    folder: Path, name: str, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor, or raise CheckpointError if it cannot become a parameter exactly."""
    if name not in found:
        raise CheckpointError(
            f"{folder}: tensor 'transformer.{name}', which config.json means, is in none of its "
            "files"
        )
    tensor = found[name]
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{folder}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json means {shape}"
        )
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        raise CheckpointError(f"{folder}: tensor {name!r} is {tensor.dtype}, allowed are {allowed}")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{folder}: tensor {name!r} holds NaN or inf")
    return tensor


# Reading and writing ``config.json``; settings that halfstep's GPT cannot honour are refused.


_KEYS: dict[str, tuple[str, Any]] = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "n_positions": ("block_size", 1024),
    "vocab_size": ("vocab_size", 50257),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
    "embd_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("dropout", 0.1),
    "resid_pdrop": ("dropout", 0.1),
}
"""Key of ``config.json`` to the field of GPTConfig and the value that a missing key means.

**Source:** ``transformers.GPT2Config``, the same since version 2.
"""

_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "n_ctx": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other spellings of keys. **Source:** ``GPT2Config.attribute_map``; n_ctx is in older files."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
"""Keys that change the function which the network computes, and the values that GPT implements.

A missing key means the first value, which is GPT2Config's default. gelu_pytorch_tanh is another
name for the same tanh formula.
"""


def read_config(
    file: Path, *, dropout: float | None = None, activation_checkpointing: bool = False
) -> GPTConfig:
    """Read the shape in ``config.json``; for arguments see :func:`load_gpt2`.

    Raises:
        CheckpointError: If the file cannot be read, describes another network, or holds a value
            that halfstep's GPT cannot honour; the message names file, key and value.
    """
    found = read_json_object(file, "a GPT-2 folder has config.json and model.safetensors")
    if found.get("model_type") != "gpt2":
        raise CheckpointError(
            f"{file}: model_type is {found.get('model_type')!r}, only 'gpt2' can be loaded"
        )
    for key, allowed in _ONLY.items():
        value = found.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"{file}: {key} is {value!r}, but halfstep's GPT honours only {allowed[0]!r}; "
                "train such a model with transformers and halfstep.precision"
            )
    values = _shape_values(file, found)
    inner = found.get("n_inner")
    if inner is not None and inner != 4 * values["n_embd"]:
        raise CheckpointError(
            f"{file}: n_inner is {inner!r}, but halfstep's GPT has 4 * n_embd or null only"
        )
    drops = {values[key] for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if dropout is None and len(drops) > 1:
        raise CheckpointError(
            f"{file}: embd_pdrop, attn_pdrop and resid_pdrop differ ({sorted(drops, key=str)}), "
            "but halfstep's GPT has one dropout; pass dropout= to choose it"
        )
    shape = {ours: values[key] for key, (ours, _) in _KEYS.items()}
    if dropout is not None:
        shape["dropout"] = dropout
    try:
        return GPTConfig(**shape, activation_checkpointing=activation_checkpointing)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _shape_values(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Read the values of ``_KEYS`` under any of their spellings, with defaults where absent."""
    values = {key: default for key, (_, default) in _KEYS.items()}
    given: dict[str, str] = {}
    for spelling in (*_KEYS, *_ALIASES):
        if spelling not in found:
            continue
        key = _ALIASES.get(spelling, spelling)
        if key in given and found[spelling] != values[key]:
            raise CheckpointError(
                f"{file}: {spelling} is {found[spelling]!r}, but {given[key]} is {values[key]!r}; "
                "they must be equal"
            )
        given[key], values[key] = spelling, found[spelling]
    return values


def write_gpt2_config(file: Path, config: GPTConfig, dtype: torch.dtype) -> None:
    """Write what ``transformers`` needs to build the same network, with weights of this dtype."""
    # Only GPT-2's vocabulary has <|endoftext|> at 50256; by default, transformers assumes it there.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    dtype_name = str(dtype).removeprefix("torch.")
    content = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(config, ours) for key, (ours, _) in _KEYS.items()},
        "n_inner": None,
        "n_ctx": config.block_size,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype_name,  # transformers 5
        "torch_dtype": dtype_name,  # transformers 4
        **{
            key: allowed[0] for key, allowed in _ONLY.items() if isinstance(allowed[0], (str, bool))
        },
    }
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# How parameters of halfstep's GPT map to Hugging Face's GPT-2, by name and by memory layout.
#
# Besides the names, two things differ: their ``Conv1D`` weights are ``(in, out)`` where ours are
# ``(out, in)``, and their fused attention projection orders its outputs (q|k|v, head, D) where ours
# orders (head, q|k|v, D) (see :class:`halfstep.trainer.models.gpt.gpt.CausalSelfAttention`).
#
# Shapes: C width, H heads, D width of a head (C = H D).


IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""Names of causal masks, which old files hold as buffers; they carry no information."""

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


def hf_name(name: str) -> str:
    """Translate our name of a parameter to theirs, without the prefix ``transformer.``.

    Example:
        >>> hf_name("layers.3.attn.qkv.weight")
        'h.3.attn.c_attn.weight'
    """
    if name.startswith("layers."):
        _, i, rest = name.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        return f"h.{i}.{_PARTS[module]}.{leaf}"
    return name.replace("final_norm.", "ln_f.")


def hf_shape(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that our parameter has in their file."""
    shape = tuple(parameter.shape)
    return shape[::-1] if _CONV1D.fullmatch(name) else shape


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
