"""Writes fp8_products.npz: the bf16 bits that mmaemu computes for products of fp8 tensors.

mmaemu models the tensor cores of an H100 PCIe bit for bit (``torch._scaled_mm`` of torch 2.7.1 with
cuBLASLt 12.8.3.14). The operands are those of ``reference.blocks``. It takes about a minute::

    pip install --no-deps mmaemu==0.1.0
    PYTHONPATH=tests python tests/golden/make_fp8_products.py
"""

from __future__ import annotations

from pathlib import Path

import mmaemu
import numpy as np
import torch
from torch import Tensor

from reference import blocks

FILE = Path(__file__).with_name("fp8_products.npz")
DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8(x: np.ndarray, element: str) -> tuple[Tensor, Tensor]:
    codes, scales, _ = blocks.quantize(x, element, "amax", None)
    return torch.from_numpy(codes).view(DTYPES[element]), torch.tensor(scales.item())


def main() -> None:
    results = {}
    for case, (*_, element) in enumerate(blocks.PRODUCTS):
        left, right = blocks.product_operands(case)
        a, scale_a = fp8(left, element)
        b, scale_b = fp8(right, "e4m3fn")
        out = mmaemu.scaled_mm(
            *(a, b.t(), scale_a, scale_b),
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
            splitk=1,  # K in one go: how cuBLAS splits so small a product is not recorded
        )
        results[str(case)] = out.view(torch.int16).numpy()
    np.savez_compressed(FILE, **results)


if __name__ == "__main__":
    main()
