"""Products in block formats against exact sums, and against a model of an H100's tensor core."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import halfstep.precision.low_bit.product as module
from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS, BlockFormat, block_format
from halfstep.precision.low_bit.product import bits_of, block_product
from reference import blocks

H100 = np.load(Path(__file__).parents[1] / "golden" / "fp8_products.npz")
PAIRS = [(name, name) for name in BLOCK_FORMATS] + [
    ("nvfp4", "nvfp4-2d"),
    ("fp8-block", "fp8-block-2d"),
    ("fp8-e5m2", "fp8"),
    ("mxfp8-e5m2", "mxfp8"),
    ("fp8-block", "fp8"),
    ("nvfp4", "mxfp8"),
]


def exact(form: BlockFormat, x: Tensor, dim: int, bits: Tensor | None = None) -> Tensor:
    """The operand's numbers in fp64, outer scale and all."""
    q = form.quantize(x, dim, bits=bits)
    return q.dequantize().double()


def bound(a: Tensor, b: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """What K exact products, added up in fp32 and rounded once, may be off by; see the module."""
    u = 2.0**-24
    gamma = (k + 3) * u / (1 - (k + 3) * u)
    # The dequantised operands that this compares with were rounded by one scale each: 2 more u.
    total = (gamma + 2 * u) * (a.abs() @ b.abs())
    if dtype == torch.bfloat16:
        total = total + ((a @ b).abs() + total) * 2.0**-8  # half a gap of 8 significant bits
    return total + 1e-36  # fp32 sums below 2^-126 may be flushed


@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_within_the_bound_of_the_exact_one(left, right, dtype):
    a = torch.from_numpy(blocks.bell(1, 128, 256)).to(dtype)
    b = torch.from_numpy(blocks.bell(2, 256, 384)).to(dtype)
    form, other = block_format(left), block_format(right)
    for draw in (None, (0, 3, 17)):
        got = block_product(a, b, left, right, a_draw=draw)
        assert got.dtype == dtype
        x, y = exact(form, a, -1, None if draw is None else bits_of(draw, a)), exact(other, b, -2)
        assert ((got.double() - x @ y).abs() <= bound(x, y, 256, dtype)).all()
        lost = (got.double() - x[:, 1:] @ y[1:]).abs() > bound(x, y, 256, dtype)
        assert lost.double().mean() > 0.3  # the bound is so tight that it misses one product of 256
        wide = block_product(a, b, left, right, a_draw=draw, out_dtype=torch.float32)
        assert torch.equal(wide.to(dtype), got)


def test_batches_and_layouts_make_no_difference():
    a = torch.from_numpy(blocks.bell(3, 64, 256)).bfloat16()
    b = torch.from_numpy(blocks.bell(4, 256, 48)).bfloat16()
    for name in ("mxfp8", "nvfp4", "fp8"):
        want = block_product(a, b, name)
        assert torch.equal(block_product(a.view(4, 16, 256), b, name).flatten(0, 1), want)
        turned = b.t().contiguous().t()
        assert torch.equal(block_product(a.t().contiguous().t(), turned, name), want)


def test_what_is_not_finite_reaches_the_product():
    a, b = torch.ones(32, 256), torch.ones(256, 32)
    a[3, 5] = torch.inf
    for name in BLOCK_FORMATS:
        if "2d" not in name:
            out = block_product(a, b, name)
            assert out[3].isnan().all()
            assert out.isnan().any(1).sum() == (32 if block_format(name).block is None else 1)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(PrecisionError, match=r"blocks of 32 along dim 1, and the tensor has 40"):
        block_product(torch.zeros(4, 40), torch.zeros(40, 4), "mxfp8")
    short = BlockFormat("short", block_format("fp8").element, (1, 64), "amax")
    with pytest.raises(PrecisionError, match="fp8-block has a scale for each 128 of K and short"):
        block_product(torch.zeros(4, 128), torch.zeros(128, 4), "fp8-block", short)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8"])
def test_long_sums_are_in_fp32_too(name):
    a = torch.from_numpy(blocks.bell(5, 16, 8192)).bfloat16()
    b = torch.from_numpy(blocks.bell(6, 8192, 16)).bfloat16()
    form = block_format(name)
    x, y = exact(form, a, -1), exact(form, b, -2)
    got = block_product(a, b, name)
    assert ((got.double() - x @ y).abs() <= bound(x, y, 8192, torch.bfloat16)).all()
    # In bf16 partial sums would be off by 2^-9 of each: a hundred times what is seen here.
    error = (got.double() - x @ y).norm() / (x @ y).norm()
    assert error < 2.0**-8


def test_random_bits_are_a_function_of_what_is_rounded():
    x = torch.zeros(64, 32)
    given = bits_of((1, 2, 3), x)
    assert torch.equal(bits_of((1, 2, 3), x.t().contiguous().t()), given)
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (bits_of(other, x) == given).sum() <= 1  # 2,048 words: one may agree by chance


def test_against_the_bits_of_an_h100():
    """At least 90 % of the bf16 outputs are equal, and the errors are within 1 %."""
    equal, count, ours, theirs, norm = 0, 0, 0.0, 0.0, 0.0
    for case, (*_, element) in enumerate(blocks.PRODUCTS):
        left, right = map(torch.from_numpy, blocks.product_operands(case))
        form = block_format("fp8" if element == "e4m3fn" else "fp8-e5m2")
        got = block_product(left, right.t(), form, "fp8", out_dtype=torch.bfloat16)
        device = torch.from_numpy(H100[str(case)]).view(torch.bfloat16)
        want = left.double() @ right.double().t()  # the error is that of fp8, and of the sum
        equal += int((got.view(torch.int16) == device.view(torch.int16)).sum())
        count += got.numel()
        ours += float((got.double() - want).square().sum())
        theirs += float((device.double() - want).square().sum())
        norm += float(want.square().sum())
    share, error, device_error = equal / count, (ours / norm) ** 0.5, (theirs / norm) ** 0.5
    print(f"{share:.4f} equal of {count}, error {error:.6f}, of the device {device_error:.6f}")
    assert len(blocks.PRODUCTS) == 20
    assert share >= 0.9
    assert error == pytest.approx(device_error, rel=0.01)


def test_the_example():
    assert doctest.testmod(module).failed == 0
