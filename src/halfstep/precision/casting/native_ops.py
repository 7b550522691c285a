"""Which functions of torch run by a compiled kernel, on bf16 tensors of a CPU.

Asked before the op table casts anything. A function that a kernel does not know in this form (its
shapes, a mask that learns, a tensor of a subclass, a mode that wants to see each operator) stays
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.kernels import attention, rows
from halfstep.kernels.library import is_plain, may_run

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Kernel = Callable[..., Any]
_LOW = torch.bfloat16
MANY = 2**18
"""Logits and LayerNorms of fewer numbers are torch's: the call costs more than the kernel saves.

**Source:** ``benchmarks/kernels_cpu.py``.
"""
SEVERAL = 2**14
"""Dropout of fewer numbers is torch's, for the same reason."""
FEW_QUERIES = 32
"""Attention of fewer queries, as of a step of generation, is torch's: a tile holds 64.

**Source:** ``benchmarks/kernels_cpu.py``.
"""
_REDUCTIONS = ("none", "sum", "mean")


def native(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a kernel makes of a call; ``NotImplemented`` where none knows it."""
    if not may_run():
        return NotImplemented
    return KERNELS[func](*args, **kwargs)


def _plain(x: Any) -> bool:
    return is_plain(x) and x.layout == torch.strided


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    given = (query, key, value)
    if not all(_plain(x) and x.dtype in (_LOW, torch.float32) for x in given):
        return NotImplemented
    if not (torch.is_autocast_enabled("cpu") or any(x.dtype == _LOW for x in given)):
        return NotImplemented  # under 16-bit weights, operands all in fp32 mean fp32
    if attn_mask is not None and (is_causal or not _plain(attn_mask)):
        return NotImplemented
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, _LOW, torch.float32):
        return NotImplemented  # torch refuses a mask of whole numbers
    if not (torch._C._get_flash_sdp_enabled() and 0 <= dropout_p < 1):
        return NotImplemented
    if not attention.fits(*given, attn_mask, enable_gqa) or query.shape[2] < FEW_QUERIES:
        return NotImplemented
    if 2 * key.shape[0] * key.shape[1] < torch.get_num_threads():
        return NotImplemented  # each head of keys is one thread's work; torch divides it further
    query, key, value = (x.to(_LOW) for x in given)
    return attention.attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    if not (_plain(input) and input.dtype == _LOW and approximate == "tanh"):
        return NotImplemented
    return rows.gelu_tanh(input)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not (training and 0 < p < 1) or inplace or not _plain(input):
        return NotImplemented
    if input.dtype not in (_LOW, torch.float32) or input.numel() < SEVERAL:
        return NotImplemented
    return rows.dropout(input, p)


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    if not _plain(input) or input.dtype != _LOW or input.numel() < MANY:
        return NotImplemented  # torch's is as fast on fp32
    return _norm(input, normalized_shape, weight, bias, eps, centred=True)


def _rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    in_fp32 = torch.is_autocast_enabled("cpu")  # as the op table has it
    if eps is None and in_fp32:
        eps = torch.finfo(torch.float32).eps
    if eps is None or not _plain(input) or not (in_fp32 or input.dtype == _LOW):
        return NotImplemented
    return _norm(input, normalized_shape, weight, None, eps, centred=False)


def _norm(x: Any, shape: Any, gain: Any, bias: Any, eps: float, *, centred: bool) -> Any:
    given = [t for t in (x, gain, bias) if t is not None]
    if not all(_plain(t) and t.dtype in (_LOW, torch.float32) for t in given):
        return NotImplemented
    if tuple(shape) != x.shape[-1:] or not x.numel():
        return NotImplemented
    if any(p is not None and p.shape != x.shape[-1:] for p in (gain, bias)):
        return NotImplemented
    to = reduce(torch.promote_types, [t.dtype for t in given])
    if torch.is_autocast_enabled("cpu"):
        to = torch.float32
    return rows.norm(x, gain, bias, eps, to, centred=centred)


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    plain = _plain(input) and _plain(target) and input.ndim == 2 and target.ndim == 1
    if not plain or weight is not None or label_smoothing:
        return NotImplemented
    if size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        return NotImplemented
    if input.dtype not in (_LOW, torch.float32) or target.dtype != torch.int64:
        return NotImplemented
    if len(input) != len(target) or input.numel() < MANY or input.stride(1) != 1:
        return NotImplemented
    counted = target != ignore_index
    low, high = (int(t) for t in torch.aminmax(target.masked_fill(~counted, 0)))
    if low < 0 or high >= input.shape[1]:
        return NotImplemented
    losses = rows.cross_entropy(input, target, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / counted.sum()


KERNELS: Mapping[Callable[..., Any], Kernel] = {
    F.scaled_dot_product_attention: _attention,
    F.gelu: _gelu,
    F.dropout: _dropout,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.cross_entropy: _cross_entropy,
}
"""A function of torch, and what runs in its place where it can."""
