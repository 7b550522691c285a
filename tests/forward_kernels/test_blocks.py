"""The compiled rounding to block formats against its definition, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep.formats import BLOCK_FORMATS, BlockFormat
from halfstep.kernels.blocks import kernel, operand, scaled_
from halfstep.precision.masters.rounding import random_bits, random_key
from reference import blocks

ALL = [
    *BLOCK_FORMATS.values(),
    replace(BLOCK_FORMATS["mxfp8-e5m2"], name="mxfp8-e5m2-floor", rule="floor"),
    replace(BLOCK_FORMATS["mxfp8"], name="mxfp8-64", block=(1, 64)),
]
every = pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)


@pytest.fixture(autouse=True)
def compiled():
    library = kernel()
    if isinstance(library, str):
        pytest.skip(f"no compiled kernel: {library}")


def bits_of(t: Tensor) -> Tensor:
    """The bits, with one NaN for all."""
    t = torch.where(t.isnan(), torch.nan, t)
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def agree(form: BlockFormat, x: Tensor, dim: int, dtype: torch.dtype, amax=None) -> None:
    key, bits = random_key(5, 9, 77), random_bits(5, 9, x.shape, stream=77)
    for by_key, by_bits in ((None, None), (key, bits)):
        found = operand(form, x, dim, dtype, key=by_key, amax=amax)
        assert found is not None
        values, left = form.operand(x, dim, bits=by_bits, amax=amax)
        assert torch.equal(bits_of(found[0]), bits_of(values.to(dtype)))
        assert (left is None) == (found[1] is None)
        if left is not None:
            assert torch.equal(bits_of(found[1]), bits_of(left))


@every
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("name", [*blocks.PIECES, "patterns"])
def test_every_bit_is_that_of_the_definition(form, dim, name):
    x = blocks.bf16_patterns() if name == "patterns" else blocks.piece(name, 256)
    if name == "patterns" and dim == -2:
        x = np.ascontiguousarray(x.T)
    x = torch.from_numpy(x)
    for dtype in (torch.float32, torch.bfloat16):
        agree(form, x, dim, dtype)
        agree(form, x.bfloat16(), dim, dtype)


@every
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite(form, bad):
    x = torch.from_numpy(blocks.piece("narrow", 256))
    x[130, 40] = bad
    for dim in (-1, -2):
        agree(form, x, dim, torch.bfloat16)
        if form.has_tensor_scale:
            for amax in (0.25, bad):
                agree(form, x, dim, torch.bfloat16, amax=torch.tensor(amax))


@every
def test_a_nan_of_any_payload_stays_one(form):
    x = torch.from_numpy(blocks.piece("narrow", 256))
    x.view(torch.int32)[::17, ::5] = 0x7FFFFFFF  # rounding up would carry into the sign
    x.view(torch.int32)[::19, ::7] = -1
    for dtype in (torch.float32, torch.bfloat16):
        agree(form, x, -1, dtype)
        agree(form, x, -2, dtype)


def key_of(noise: int) -> int:
    """The key with which element 0 draws this word: lowbias32 backwards."""
    x = noise ^ noise >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize(
    ("noise", "number", "result"),
    [
        (0, 2.0, 2.0),  # a number of the format stays, whatever is drawn
        (0, 2.5, 3.0),
        ((0x800000 << 8) - 1, 2.5, 3.0),
        (0x800000 << 8, 2.5, 2.0),  # half of all draws go up: those below a half
        (0xFFFFFFFF, 2.999, 2.0),
    ],
)
def test_the_draws_at_the_ends(noise, number, result):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = number, 6.0  # the scale is 1
    found = operand(BLOCK_FORMATS["mxfp4"], x, -1, torch.float32, key=key_of(noise))
    assert found is not None
    assert found[0][0, 0] == result


@every
def test_layouts_shapes_and_threads(form):
    x = torch.from_numpy(blocks.piece("blocks apart", 512))
    sparse = torch.zeros(512, 1024)
    sparse[:, ::2] = x
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for dim in (-1, -2):
                for view in (x.t(), sparse[:, ::2], x[:128, :384], x[128:], x[:, :128].t()):
                    agree(form, view, dim, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    if form.block in (None, (1, 32)):
        agree(form, x[:3, :32], -1, torch.float32)
        agree(form, x[:32, :5], -2, torch.float32)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-2d"])
@pytest.mark.parametrize("dim", [-1, -2])
def test_scales_of_blocks_multiply_as_by_the_definition(name, dim):
    form = BLOCK_FORMATS[name]
    x = torch.from_numpy(blocks.piece("blocks apart", 256)).bfloat16()
    x[200, 17] = torch.inf
    for view in (x, x.t()):
        values, left = operand(form, view, dim, torch.float32, scaled=True)
        assert left is None
        apart, scales = form.operand(view, dim)
        together = form.join(form.split(apart, dim) * form.spread(scales, dim), dim)
        assert torch.equal(bits_of(values), bits_of(together))


@pytest.mark.parametrize("shape", [(3, 40), (64, 128), (1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", [(0.3, None), (None, 7e-5), (1.7, 2e-3), (1e30, 1e30)])
def test_a_product_is_scaled_in_one_pass(shape, with_bias, scales):
    patterns = torch.from_numpy(blocks.bf16_patterns()).bfloat16().flatten()
    product = patterns[: shape[0] * shape[1]].view(shape).clone()
    bias = patterns[-shape[1] :].flip(0) if with_bias else None
    left, right = (None if scale is None else torch.tensor(scale) for scale in scales)
    wide = product.float()
    for scale in (left, right):
        wide = wide if scale is None else wide * scale
    wide = wide if bias is None else wide + bias
    found = scaled_(product, left, right, bias)
    assert found is product
    assert torch.equal(bits_of(found), bits_of(wide.bfloat16()))


def test_a_product_that_the_kernel_does_not_take_stays_as_it_is():
    product = torch.ones(4, 6, dtype=torch.bfloat16).t()
    assert scaled_(product, torch.tensor(2.0), None, None) is None
    assert (product == 1).all()


def test_what_the_kernel_does_not_take_is_left_to_the_definition():
    form = BLOCK_FORMATS["mxfp8"]
    assert operand(form, torch.zeros(32, 32, dtype=torch.float16), -1, torch.bfloat16) is None
    assert operand(form, torch.zeros(0, 32), -1, torch.bfloat16) is None
    assert operand(form, torch.zeros(32, 32, device="meta"), -1, torch.bfloat16) is None
