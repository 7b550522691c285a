"""Native products below 16 bits, by ``torch.nn.functional.scaled_mm`` on a CUDA device.

A device has a scheme natively if its tensor cores scale such blocks, torch has the function, and a
live probe finds every product of the scheme equal to its simulation, within the rounding of sums.

Shapes: M x N the result, K what is summed over.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.formats.blocks import BLOCK_FORMATS, BlockFormat, Quantized
from halfstep.formats.floats import E2M1, FP32
from halfstep.precision.policy.recipe import OPERANDS, SCHEMES

_TILE_ROWS, _TILE_COLUMNS = 128, 4
_RECIPES = {
    None: "TensorWise",
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
        known = {"cpu": "a CPU", "mps": "a Mac's GPU"}
        return f"{known.get(device.type, device.type)} has no {name} products"
    if torch.version.hip:
        return f"halfstep has no {name} products for AMD's GPUs"
    has = torch.cuda.get_device_capability(device)
    if has < scheme.since:
        here, since = "{}.{}".format(*has), "{}.{}".format(*scheme.since)
        return f"compute capability {here} has no {name} tensor cores ({since} has)"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    return _failed_probe(name, device)


def scaled_product(a: Quantized, b: Quantized) -> Tensor:
    """The fp32 product (M, N) of two matrices with blocks along the dim that is summed over.

    That is dim 1 of (M, K) and (N, K), and dim 0 of (K, M) and (K, N).
    """
    left, left_scales = _rows(a, 1)
    right, right_scales = _rows(b, 16)
    kinds: Any = F.ScalingType
    swizzle: Any = None
    if a.format.block is not None and a.format.scale is not FP32:
        swizzle = F.SwizzleType.SWIZZLE_32_4_4
    out = F.scaled_mm(
        left,
        right.t(),
        left_scales,
        getattr(kinds, _RECIPES[a.format.block]),
        right_scales,
        getattr(kinds, _RECIPES[b.format.block]),
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.float32,
    )
    for outer in (a.outer, b.outer):
        out = out if outer is None else out * outer
    return out[:, : b.codes.shape[1 - b.dim % 2]]


def _rows(q: Quantized, multiple: int) -> tuple[Tensor, Tensor]:
    """Codes with the summed dim last and their scales, laid out as cuBLAS reads them.

    Rows are filled up to a multiple with zeros, and K to 16 bytes.
    """
    along = q.dim % 2 == 1
    raw = q.codes.view(torch.uint8)
    codes = raw if along else raw.t()
    scales = q.scales if along or not q.scales.ndim else q.scales.t()
    packed = q.format.element is E2M1
    missing = -codes.shape[0] % multiple
    codes = F.pad(codes, (0, -codes.shape[1] % (32 if packed else 16), 0, missing)).contiguous()
    if q.format.block is None:
        return codes.view(q.codes.dtype), scales
    if q.format.scale is FP32:
        return codes.view(q.codes.dtype), _by_columns(q.format, scales, missing)
    height = q.format.block[0]
    if height > 1:
        scales = scales.repeat_interleave(height, 0)
    laid = swizzled(scales.view(torch.uint8)).view(scales.dtype)
    return (packed_e2m1(codes) if packed else codes.view(q.codes.dtype)), laid


def _by_columns(form: BlockFormat, scales: Tensor, missing: int) -> Tensor:
    """fp32 scales of 1x128 and 128x128 blocks, as torch checks them.

    **Source:** aten/src/ATen/native/cuda/ScaledBlas.cpp of torch 2.13: (rows, K/128) with stride
    (1, rows), or (K/128 filled up to 4, rows/128) with stride (1, that).
    """
    assert form.block is not None
    if form.block[0] == 1:
        full = F.pad(scales, (0, 0, 0, missing), value=1.0)
    else:
        full = F.pad(scales, (0, -scales.shape[1] % 4), value=1.0).t()
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


def packed_e2m1(codes: Tensor) -> Tensor:
    """Codes of 4 bits, (rows, K), two in a byte along K, the first in the lower half."""
    pairs = codes.reshape(codes.shape[0], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.float4_e2m1fn_x2)


def _failed_probe(name: str, device: torch.device) -> str:
    """What a product that was tried found wrong; empty if nothing."""
    for product, kinds in OPERANDS.items():
        forms = [BLOCK_FORMATS[getattr(SCHEMES[name], kind)] for kind in kinds]
        generator = torch.Generator().manual_seed(0)
        a, b = (_probe_of(rows, generator).to(device) for rows in (256, 384))
        left, right = forms[0].quantize(a, 1), forms[1].quantize(b, 1)
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                found = scaled_product(left, right).double()
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"torch's {name} product of a {product} failed there ({first:.120})"
        exact, most = _exact(left, right)
        # Tensor cores align the numbers of a group to the largest and cut them off: 13 bits stay.
        # An H100's fp8 product is off by 2^-10 here, and one with misplaced scales by more than 1.
        if not bool(((found - exact).abs() <= most * 2.0**-9).all()):
            return f"a live probe found torch's {name} product of a {product} wrong there"
    return ""


def _exact(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    left, right = a.dequantize().double(), b.dequantize().double().t()
    return left @ right, left.abs() @ right.abs()


def _probe_of(rows: int, generator: torch.Generator) -> Tensor:
    """Numbers whose blocks have scales of their own, so that a wrong layout of scales shows."""
    x = torch.randn(rows, 512, generator=generator)
    sizes = torch.randint(-4, 5, (rows, 512 // 16), generator=generator).float().exp2()
    return (x * sizes.repeat_interleave(16, 1)).bfloat16()
