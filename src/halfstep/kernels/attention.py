"""Attention over bf16 tensors on a CPU, by the compiled kernel of ``attention.cpp``.

The scores of a tile of 64 queries and 64 keys exist for as long as the tile is worked on. Products
take bf16 operands and sum in fp32; the softmax is fp32; its weights are rounded to bf16 as the
operand of the second product, as tensor cores have it.

Shapes: B batch, H heads, K heads of keys and values (H is a multiple of it), T queries, S keys,
D channels of a head.

**Source:** Dao et al. 2022, "FlashAttention"; Rabe and Staats 2021, "Self-attention Does Not Need
O(n^2) Memory", for the running maximum and sum.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.kernels.library import (
    Address,
    address,
    by_torch,
    differentiated,
    drawn_seed,
    library,
    new,
    strided_address,
)

_Stride = ctypes.c_int64 * 3


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, Address) for name in ("query", "key", "value", "mask", "out", "lse")),
        *((name, Address) for name in ("grad_out", "grad_query", "grad_key", "grad_value")),
        *((f"{name}_stride", _Stride) for name in ("query", "key", "value", "out")),
        *((f"grad_{name}_stride", _Stride) for name in ("out", "query", "key", "value")),
        ("mask_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "queries", "keys")),
        ("channels", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("dropout", ctypes.c_float),
        ("seed", ctypes.c_uint64),
    )


class Settings(NamedTuple):
    """What attention does besides its operands."""

    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None  # 1 / sqrt(D)
    seed: int = 0


def fits(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, grouped: bool
) -> bool:
    """Whether the kernel knows these shapes: D is a multiple of 16 up to 256, the mask constant."""
    if not (q_BHTD.ndim == k_BKSD.ndim == v_BKSD.ndim == 4):
        return False
    (batch, heads, queries, channels), keys = q_BHTD.shape, k_BKSD.shape[2]
    if channels % 16 or not 16 <= channels <= 256 or not (queries and keys and batch and heads):
        return False
    expected = (batch, k_BKSD.shape[1], keys, channels)
    if k_BKSD.shape != expected or v_BKSD.shape != expected:
        return False
    if k_BKSD.shape[1] != heads and (not grouped or heads % k_BKSD.shape[1]):
        return False
    if mask is None:
        return True
    whole = (batch, heads, queries, keys)
    right = all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(whole), strict=False))
    return mask.ndim <= 4 and right and not mask.requires_grad


def attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` computes, for operands that :func:`fits` accepts."""
    if mask is not None:  # what is added to the scores, in fp32
        if mask.dtype == torch.bool:
            mask = new(*mask.shape).zero_().masked_fill_(~mask, -math.inf)
        mask = mask.float().expand(*q_BHTD.shape[:3], k_BKSD.shape[2])
    seed = drawn_seed() if dropout else 0
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q_BHTD, k_BKSD, v_BKSD, mask, Settings(dropout, causal, scale, seed)
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """The tensor itself, or a copy where channels are not adjacent or a row starts unaligned."""
    return x if x.stride(-1) == 1 and all(s % 2 == 0 for s in x.stride()[:-1]) else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """A new tensor whose heads lie side by side, as a model reshapes them next."""
    batch, heads, positions, channels = x.shape
    return x.new_empty(batch, positions, heads, channels).transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings
    ) -> Tensor:
        ctx.settings = settings
        out, lse = attend(q, k, v, mask, settings)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        grads: tuple[Tensor | None, ...]
        if by_torch(grad):
            grads = _differentiable(q, k, v, mask, grad, ctx.settings)
        else:
            grads = into = (_like(q), _like(k), _like(v))
            attend_backward(into, grad, q, k, v, mask, out, lse, ctx.settings)
        return (*grads, None, None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Attention without autograd; the result, and what the backward needs of the softmax.

    ``mask`` is fp32, is added to the scores and has the shape ``(B, H, T, S)``.
    """
    out, lse = _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    q, k, v = map(_rows, (q, k, v))  # kept by name: the call holds addresses only
    call = _call(q, k, v, mask, out, lse, settings)
    library().halfstep_attention(ctypes.byref(call), torch.get_num_threads())
    return out, lse


def attend_backward(
    into: tuple[Tensor, ...], grad: Tensor, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, out: Tensor, lse: Tensor, settings: Settings,
) -> None:  # fmt: skip
    """Write the gradients of query, key and value into three tensors with adjacent channels."""
    q, k, v, grad = _rows(q), _rows(k), _rows(v), _rows(grad)
    call = _call(q, k, v, mask, out, lse, settings)
    _place(call, "grad_out", grad, q)
    for name, made, like in zip(("query", "key", "value"), into, (q, k, v), strict=True):
        _place(call, f"grad_{name}", made, like)
    library().halfstep_attention_backward(ctypes.byref(call), torch.get_num_threads())


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    settings: Settings,
) -> _Call:  # fmt: skip
    if not fits(q, k, v, mask, True):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, mask) if x is not None)
        raise PrecisionError(f"the kernel takes what fits() accepts, got shapes {shapes}")
    scale = 1 / math.sqrt(q.shape[-1]) if settings.scale is None else settings.scale
    call = _Call(**settings._asdict() | {"scale": scale})
    call.lse = address(lse, math.prod(q.shape[:3]), torch.float32)
    for name, x, like in (("query", q, q), ("key", k, k), ("value", v, k), ("out", out, q)):
        _place(call, name, x, like)
    if mask is not None:
        whole = (*q.shape[:3], k.shape[2])
        call.mask = strided_address(mask, whole, torch.float32, rows=False)
        call.mask_stride[:] = mask.stride()
    call.batch, call.heads, call.queries, call.channels = q.shape
    call.key_heads, call.keys = k.shape[1:3]
    return call


def _place(call: _Call, name: str, x: Tensor, like: Tensor) -> None:
    setattr(call, name, strided_address(x, like.shape, torch.bfloat16))
    getattr(call, f"{name}_stride")[:] = x.stride()[:3]


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor, settings: Settings
) -> tuple[Tensor | None, ...]:
    """The gradients by torch's operations, which can be differentiated again."""
    if settings.dropout:
        raise NotImplementedError(
            "attention with dropout has no second derivative here: set dropout_p=0.0 where "
            "create_graph=True, or ask for torch's own by torch.nn.attention.sdpa_kernel(MATH)"
        )
    options: Any = {"is_causal": settings.causal, "scale": settings.scale}
    options |= {"enable_gqa": k.shape[1] != q.shape[1]}
    mask = None if mask is None else mask.to(q.dtype)
    attend_by_torch = partial(F.scaled_dot_product_attention, attn_mask=mask, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return differentiated(attend_by_torch, (q, k, v), grad)
