"""Writes block_formats.json: what torchao makes of the inputs of ``reference.blocks``.

It is run by hand where torchao is installed, once for each version; every run adds its own entry.
The NVFP4 reference is a file of torchao's tests (transcribed from TransformerEngine), so it is
there only with torchao's repository on the path::

    pip install --no-deps torchao==0.18.0
    PYTHONPATH=tests python tests/golden/make_block_formats.py 0.18.0
    PYTHONPATH=tests:ao:ao/test/prototype/moe_training/nvfp4_training \\
        python tests/golden/make_block_formats.py 36027d82

36027d82 is pytorch/ao of 2026-08-21, on its way to 0.19. Release 0.18.0 has two mistakes that are
mended there: it divides by 2^-126 or 1 where it stores the scale 2^-127, and its ``rceil`` takes a
logarithm in fp32, which misses an amax just above a number that needs no rounding up.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.blockwise_fp8_training.kernels import (
    torch_blockwise_scale_act_quant_lhs,
    torch_blockwise_scale_weight_quant,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx

from reference import blocks

try:
    from nvfp4_reference import nvfp4_reference_quantize
except ImportError:
    nvfp4_reference_quantize = None

FILE = Path(__file__).with_name("block_formats.json")
SIDES = (256, 1024)  # of the quick and of the slow tier
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def mx(element: torch.dtype, mode: ScaleCalculationMode) -> Quantize:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = to_mx(x, element, 32, mode)
        codes = codes.view(torch.uint8)
        return (unpack_uint4(codes) if element == torch.float4_e2m1fn_x2 else codes), scales

    return quantize


def nvfp4(block: str) -> Quantize:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        found = nvfp4_reference_quantize(x, x.abs().max(), block=block)
        return unpack_uint4(found.codes), found.block_scale

    return quantize


def fp8(element: torch.dtype) -> Quantize:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensor_to_scale(x, element)
        return to_fp8_saturated(x * scale, element), 1.0 / scale

    return quantize


RCEIL = ScaleCalculationMode.RCEIL
RECIPES: dict[str, Quantize] = {
    "mxfp8": mx(torch.float8_e4m3fn, RCEIL),
    "mxfp8-e5m2": mx(torch.float8_e5m2, RCEIL),
    "mxfp4": mx(torch.float4_e2m1fn_x2, RCEIL),
    "fp8": fp8(torch.float8_e4m3fn),
    "fp8-e5m2": fp8(torch.float8_e5m2),
    "fp8-block": torch_blockwise_scale_act_quant_lhs,
    "fp8-block-2d": torch_blockwise_scale_weight_quant,
}
if nvfp4_reference_quantize is not None:
    RECIPES |= {"nvfp4": nvfp4("1x16"), "nvfp4-2d": nvfp4("16x16")}


def digest(t: Tensor) -> str:
    return hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:10]


def both(quantize: Quantize, x: np.ndarray) -> list[str]:
    codes, scales = quantize(torch.from_numpy(x))
    return [digest(codes), digest(scales)]


def main(version: str) -> None:
    written = json.loads(FILE.read_text()) if FILE.exists() else {}
    patterns = blocks.bf16_patterns()
    finite = np.where(np.isfinite(patterns), patterns, 0.0).astype(np.float32)
    written[version] = {
        name: {f"{piece} {side}": both(quantize, blocks.piece(piece, side))
               for piece in blocks.PIECES for side in SIDES}
        | {"bf16 patterns": both(quantize, finite)}
        | ({"not finite": both(quantize, patterns)[1:]} if name.startswith("mx") else {})
        for name, quantize in RECIPES.items()
    }  # fmt: skip
    text = json.dumps(written, indent=1)
    FILE.write_text(re.sub(r"\[\s+([^\]]*?)\s+\]", r"[\1]", text).replace(",\n     ", ", ") + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
