"""Where a parameter of our GPT is in a Hugging Face GPT-2, and how it lies there.

Two differences beside the names: their ``Conv1D`` weights are ``(in, out)`` where ours are
``(out, in)``, and their fused attention projection orders its outputs (q|k|v, head, D) where ours
orders (head, q|k|v, D) (see :class:`halfstep.models.layers.CausalSelfAttention`).

Shapes: C width, H heads, D width of a head (C = H D).
"""

from __future__ import annotations

import re

import torch

IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""Causal masks that old files hold as buffers; they carry no information."""

_PARTS = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
"""Modules of a block, ours to theirs."""

_CONV1D = re.compile(r"layers\.\d+\.(attn|mlp)\.\w+\.weight")


def hf_name(name: str) -> str:
    """Their name of our parameter, without ``transformer.`` in front.

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
    """The shape that our parameter has in their file."""
    shape = tuple(parameter.shape)
    return shape[::-1] if _CONV1D.fullmatch(name) else shape


def from_hf(name: str, tensor: torch.Tensor, n_head: int) -> torch.Tensor:
    """Their tensor as a contiguous fp32 copy in our layout.

    Args:
        name: Our name of the parameter.
        tensor: Of shape ``hf_shape(name, ...)``, fp32 or 16 bits.
        n_head: H.
    """
    if _CONV1D.fullmatch(name):
        tensor = tensor.t()
    if ".qkv." in name:
        tensor = torch.unflatten(tensor, 0, (3, n_head, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def to_hf(name: str, parameter: torch.Tensor, n_head: int) -> torch.Tensor:
    """Our parameter in their layout, in its own dtype; may be a view. The inverse of `from_hf`."""
    if ".qkv." in name:
        parameter = torch.unflatten(parameter, 0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return parameter.t() if _CONV1D.fullmatch(name) else parameter
