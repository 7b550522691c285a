"""Hugging Face's GPT-2 ``config.json``, read and written; what our GPT cannot honour is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import CheckpointError, ConfigError
from halfstep.models.gpt_config import GPTConfig

_DEFAULTS: dict[str, Any] = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
}
"""What a missing key means. **Source:** ``transformers.GPT2Config``, the same since version 2."""

_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other spellings that transformers takes. **Source:** ``GPT2Config.attribute_map``."""

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
"""Keys that change the function the network computes, and the values for which it is ours.

A missing key means the first value, which is GPT2Config's default. gelu_pytorch_tanh is another
name of the same tanh formula.
"""


def read_config(
    file: Path, *, dropout: float | None = None, activation_checkpointing: bool = False
) -> GPTConfig:
    """The shape that ``config.json`` describes.

    Args:
        file: Path of the ``config.json``.
        dropout: Instead of the file's three probabilities; None takes theirs.
        activation_checkpointing: Passed on.

    Raises:
        CheckpointError: The file cannot be read, describes another network, or holds a value that
            our GPT cannot honour; the message names file, key and value.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} does not exist: a GPT-2 folder has config.json and model.safetensors"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(found).__name__}")
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
    try:
        return GPTConfig(
            n_layer=values["n_layer"],
            n_head=values["n_head"],
            n_embd=values["n_embd"],
            block_size=values["n_positions"],
            vocab_size=values["vocab_size"],
            dropout=drops.pop() if dropout is None else dropout,
            activation_checkpointing=activation_checkpointing,
            layer_norm_eps=values["layer_norm_epsilon"],
        )
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _shape_values(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The values of ``_DEFAULTS``'s keys, under whichever spelling, defaults where absent."""
    values = dict(_DEFAULTS)
    given: dict[str, str] = {}
    for spelling in (*_DEFAULTS, *_ALIASES, "n_ctx"):
        if spelling not in found:
            continue
        key = {**_ALIASES, "n_ctx": "n_positions"}.get(spelling, spelling)
        if key in given and found[spelling] != values[key]:
            raise CheckpointError(
                f"{file}: {spelling} is {found[spelling]!r}, but {given[key]} is {values[key]!r}; "
                "they must be equal"
            )
        given[key], values[key] = spelling, found[spelling]
    return values


def write_config(file: Path, config: GPTConfig, dtype: torch.dtype) -> None:
    """Writes what ``transformers`` needs to build the same network.

    Args:
        file: Path of the new ``config.json``.
        config: Of the model.
        dtype: Of the weights beside it.
    """
    # Only the GPT-2 vocabulary has <|endoftext|> at 50256; transformers would assume it of others.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    dtype_name = str(dtype).removeprefix("torch.")
    content = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": None,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_eps,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
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
