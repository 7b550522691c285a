"""Writes Hugging Face GPT-2 folders: ``config.json`` and ``model.safetensors``.

Besides the names, two things differ: their ``Conv1D`` weights are ``(in, out)`` where ours are
``(out, in)``, and their fused attention projection orders its outputs (q|k|v, head, D) where ours
orders (head, q|k|v, D) (see :class:`~halfstep.trainer.models.gpt.CausalSelfAttention`).

Shapes: C width, H heads, D width of a head (C = H D).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfstep.trainer.models.causal_lm import random_ids, require_faithful
from halfstep.trainer.models.gpt import GPT
from halfstep.trainer.models.pretrained import (
    WEIGHTS,
    new_folder,
    require_finite,
    require_library,
)

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


@torch.no_grad()
def export_gpt2(
    model: GPT, folder: Path, dtype: torch.dtype, beside: Callable[[Path], object]
) -> str:
    """Write such a folder, and what ``beside`` writes there, if ``transformers`` computes the same.

    The model must be in fp32 and is used up. For the result and errors see
    :func:`~halfstep.trainer.models.causal_lm.require_faithful`.
    """
    ids_BT = random_ids(model.config.vocab_size, min(16, model.config.block_size))
    trained_BTV = model.eval()(ids_BT)
    with new_folder(folder) as empty:
        save_gpt2(model, empty, dtype)
        beside(empty)
        return require_faithful(empty, dtype, model, model, ids_BT, trained_BTV)


def save_gpt2(model: GPT, folder: Path, dtype: torch.dtype) -> None:
    """Write into an empty folder what ``GPT2LMHeadModel.from_pretrained`` reads.

    Raises:
        CheckpointError: If a weight is not finite in ``dtype``.
    """
    shape, tensors = model.config, {}
    # only GPT-2's vocabulary has <|endoftext|> at 50256, where transformers assumes it
    end = 50256 if shape.vocab_size == 50257 else None
    config = require_library("transformers").GPT2Config(
        n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
        n_positions=shape.block_size, vocab_size=shape.vocab_size,
        layer_norm_epsilon=shape.layer_norm_eps, attn_pdrop=shape.dropout,
        embd_pdrop=shape.dropout, resid_pdrop=shape.dropout, bos_token_id=end, eos_token_id=end,
        architectures=["GPT2LMHeadModel"], dtype=dtype,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        theirs = f"transformer.{hf_name(name)}"
        tensor = to_hf(name, parameter.detach(), shape.n_head).to("cpu", dtype)
        require_finite(tensor, folder, theirs)
        tensors[theirs] = tensor.contiguous()
    config.save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """Translate our name of a parameter to theirs, without the prefix ``transformer.``."""
    if name.startswith("layers."):
        _, i, rest = name.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        return f"h.{i}.{_PARTS[module]}.{leaf}"
    return name.replace("final_norm.", "ln_f.")


def to_hf(name: str, parameter: torch.Tensor, n_head: int) -> torch.Tensor:
    """Convert our parameter to their layout, same dtype, maybe as a view."""
    if ".qkv." in name:
        parameter = torch.unflatten(parameter, 0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return parameter.t() if _CONV1D.fullmatch(name) else parameter
