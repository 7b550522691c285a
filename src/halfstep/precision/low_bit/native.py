"""Native matmuls below 16 bits on a CUDA device, by torch's ``_scaled_mm`` and ``F.scaled_mm``.

A device has a scheme natively if its tensor cores scale such blocks. What torch's build lacks for
that, it says itself.

Shapes: M x N the result, K what is summed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.formats.blocks import BlockFormat, Quantized
from halfstep.formats.floats import E2M1, FP32
from halfstep.precision.policy.devices import kind_of
from halfstep.precision.policy.recipe import SCHEMES
from halfstep.precision.policy.rules import Placement

_TILE_ROWS, _TILE_COLUMNS = 128, 4
_NAMES = {
    (1, 16): "BlockWise1x16",
    (16, 16): "BlockWise1x16",
    (1, 32): "BlockWise1x32",
    (1, 128): "BlockWise1x128",
    (128, 128): "BlockWise128x128",
}
"""torch's names of scales by the blocks of a format; each row has its own of a 16 x 16 block."""


@cache
def why_not_native(name: str, device: torch.device) -> str:
    """Why a device that is here does not multiply in a scheme natively; empty where it does."""
    scheme = SCHEMES[name]
    if device.type != "cuda":
        return f"{'a CPU' if device.type == 'cpu' else device.type} has no {name} products"
    if torch.version.hip:
        return f"halfstep has no {name} products for AMD's GPUs"
    has = torch.cuda.get_device_capability(device)
    if not scheme.since <= has < scheme.until:
        here, since = "{}.{}".format(*has), "{}.{}".format(*scheme.since)
        return f"compute capability {here} has no {name} tensor cores ({since} has)"
    return ""


def stays_bf16(layer: Placement) -> bool:
    """Whether a layer with a recipe multiplies in bf16 on its device, as too narrow.

    Where rounding takes longer than tensor cores gain, bf16 is faster. A rule that names the layer
    asks for its recipe all the same.
    """
    weight: Any = layer.module.weight
    if layer.direct or any(why_not_native(s.name, weight.device) for s in layer.recipe.schemes()):
        return False
    rows, columns = weight.shape
    kind = kind_of(weight.device)
    least = 0 if kind is None else kind.fp8_from
    odd = rows % 16 or columns % 16  # which tensor cores do not take
    return bool(odd or rows * columns < least * (rows + columns))


def scaled_matmul(
    a: Any,
    b: Any,
    forms: Sequence[BlockFormat],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """``a @ b.t()`` of codes (M, K) and (N, K) that :func:`laid` made.

    A tensor core adds in fp32; ``fast`` leaves partial sums in it, which is less exact.
    """
    if forms[0].block is None:
        # F.scaled_mm cannot be traced by torch.compile of torch 2.11
        return torch._scaled_mm(
            a.numbers, b.numbers.t(), a.scales, b.scales, bias=bias, out_dtype=dtype,
            use_fast_accum=fast,
        )  # fmt: skip
    names = [_NAMES[form.block or (1, 1)] for form in forms]
    wide: Tensor = block_scaled_mm(a.numbers, b.numbers, a.scales, b.scales, names[0], names[1])
    for outer in (a.outer, b.outer):
        wide = wide if outer is None else wide * outer
    return wide if bias is None else wide + bias


@torch.library.custom_op("halfstep::block_scaled_mm", mutates_args=())
def block_scaled_mm(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, a_name: str, b_name: str
) -> Tensor:
    """The fp32 product (M, N) of codes with scales of blocks.

    It is an operator of its own, since torch.compile cannot trace F.scaled_mm in torch 2.11, and
    compiled code knows neither packed e2m1 nor e8m0: they come as uint8.
    """
    a_kind, b_kind = (getattr(F.ScalingType, name) for name in (a_name, b_name))
    swizzle = None
    if a_scales.dtype == torch.uint8:
        form = torch.float8_e4m3fn if a_name == _NAMES[1, 16] else torch.float8_e8m0fnu
        a_scales, b_scales = a_scales.view(form), b_scales.view(form)
        swizzle = F.SwizzleType.SWIZZLE_32_4_4
    if a.dtype == torch.uint8:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    product: Tensor = F.scaled_mm(
        a, b.t(), a_scales, a_kind, b_scales, b_kind,
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=torch.float32,
    )  # fmt: skip
    return product


@block_scaled_mm.register_fake
def _(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)


def laid(q: Quantized) -> tuple[Tensor, Tensor]:
    """Codes (rows, K) with blocks along K and their scales, as cuBLAS reads them.

    Codes of e2m1, and scales of 8 bits, are uint8.
    """
    codes, scales, block = q.codes.contiguous(), q.stored, q.format.block
    if block is None:
        return codes, scales
    if q.format.scale is FP32:
        return codes, _by_columns(scales, block[0])
    if block[0] > 1:
        scales = scales.repeat_interleave(block[0], 0)
    if q.format.element is E2M1:  # two in a byte along K, the first in the lower half
        pairs = codes.reshape(codes.shape[0], -1, 2)
        codes = pairs[..., 0] | pairs[..., 1] << 4
    return codes, swizzled(scales)


def _by_columns(scales: Tensor, height: int) -> Tensor:
    """fp32 scales of 1x128 and 128x128 blocks, as torch checks them.

    **Source:** aten/src/ATen/native/cuda/ScaledBlas.cpp of torch 2.13: (rows, K/128) with stride
    (1, rows), or (K/128 filled up to 4, rows/128) with stride (1, that).
    """
    full = scales if height == 1 else F.pad(scales, (0, -scales.shape[1] % 4), value=1.0).t()
    # .t().contiguous().t() leaves other strides where a dim is 1, and torch checks them
    return torch.empty_strided(full.shape, (1, len(full)), device=full.device).copy_(full)


def swizzled(scales: Tensor) -> Tensor:
    """Scales of blocks, (rows, blocks), in tiles of 128 x 4 as tensor cores read them.

    Scale (r, c) of a tile lies at byte (r mod 32) 16 + (r div 32) 4 + c of its 512; tiles follow
    each other by rows. Both dims are filled up with zeros.

    **Source:** cuBLAS 13 documentation, "1D Block Scaling Factors Layout".
    """
    rows, columns = scales.shape
    full = F.pad(scales, (0, -columns % _TILE_COLUMNS, 0, -rows % _TILE_ROWS))
    tiles = full.reshape(-1, 4, 32, full.shape[1] // _TILE_COLUMNS, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
