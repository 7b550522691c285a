"""Block formats against the definition in NumPy, every code, every scale, and the peers' bits.

``golden/block_formats.json`` holds digests of what torchao at 36027d82 (pytorch/ao, 2026-08-21) and
the NVFP4 reference in its tests make of the inputs of ``reference.blocks``.
"""

from __future__ import annotations

import doctest
import hashlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import halfstep.formats.blocks
from every import every
from halfstep.errors import PrecisionError
from halfstep.formats import (
    BLOCK_FORMATS,
    E2M1,
    E8M0,
    MXFP8,
    NVFP4,
    BlockFormat,
)
from halfstep.precision.masters.rounding import random_bits
from reference import blocks

ALL = [*BLOCK_FORMATS.values()]
GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("block_formats.json").read_text())
MX = [form for form in ALL if form.scale is E8M0]


def digest(t: Tensor) -> str:
    return hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:10]


def codes_and_scales(form: BlockFormat, x: np.ndarray) -> list[str]:
    found = form.quantize(torch.from_numpy(x))
    return [digest(found.codes), digest(found.scales)]


def finite_patterns() -> np.ndarray:
    patterns = blocks.bf16_patterns()
    return np.where(np.isfinite(patterns), patterns, 0.0).astype(np.float32)


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but that NaN equals NaN."""
    same = torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    return same and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


# The definition


def test_codes_scales_and_numbers_are_those_of_the_definition():
    def check(form, name):
        x = finite_patterns() if name == "patterns" else blocks.piece(name, 256)
        codes, scales, numbers = blocks.quantize(x, form.element.name, form.rule, form.block)
        found = form.quantize(torch.from_numpy(x))
        assert np.array_equal(found.codes.view(torch.uint8).numpy(), codes)
        stored = found.scales if form.rule == "amax" else found.scales.view(torch.uint8)
        assert np.array_equal(stored.numpy().reshape(scales.shape), scales)
        back = replace(found, outer=None).dequantize(torch.float32)
        with np.errstate(over="ignore", under="ignore"):
            assert np.array_equal(back.numpy(), numbers.astype(np.float32))

    every(itertools.product(ALL, [*blocks.PIECES, "patterns"]), check)


# The peers


@pytest.mark.parametrize("side", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_codes_and_scales_equal_torchao_s_and_the_nvfp4_reference_s(side):
    """10.5 million numbers in the slow tier, 0.7 million in the quick one, 0 may differ."""

    def check(form, name):
        got = codes_and_scales(form, blocks.piece(name, side))
        assert got == GOLDEN[form.name][f"{name} {side}"]

    every(itertools.product(ALL, blocks.PIECES), check)


def test_every_bf16_pattern_equals_the_peers():
    def check(form):
        golden = GOLDEN[form.name]
        assert codes_and_scales(form, finite_patterns()) == golden["bf16 patterns"]
        if form in MX:  # the scales of blocks that are not finite
            assert codes_and_scales(form, blocks.bf16_patterns())[1:] == golden["not finite"]

    every(ALL, check)


# What a bf16 product relies on


def numbers_of(form: BlockFormat, codes: Tensor, scales: Tensor) -> Tensor:
    """Every code times every scale, (scales, codes), in fp64."""
    element = torch.from_numpy(
        blocks.element_numbers(codes.numpy().astype(np.uint8), form.element.name)
    )
    return scales[:, None].double() * element


def test_every_mx_number_is_a_bf16_number_but_at_the_ends_of_its_range():
    def check(form):
        count = len(blocks.ELEMENTS[form.element.name])
        scales = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))
        numbers = numbers_of(form, torch.arange(count), scales)
        exact = numbers.bfloat16().double() == numbers
        # Below, bf16 ends at 2^-133; above, at less than 2^128.
        assert torch.equal(~exact, (numbers >= 2.0**128) | (numbers % 2.0**-133 != 0))
        fine = 2.0 ** (-133 - math.log2(form.element.min_subnormal))
        coarse = 2.0**128 / form.element.max
        inside = (scales >= fine) & (scales < coarse)
        assert exact[inside].all()
        assert inside.sum() >= 230  # of 255 scales

    every(MX, check)


def test_every_nvfp4_code_times_every_block_scale_is_a_bf16_number():
    scales = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers_of(NVFP4, torch.arange(16), scales.float())
    assert torch.equal(numbers.bfloat16().double(), numbers)


# Layouts and arguments


def test_a_dim_is_quantised_as_if_it_were_the_last():
    def check(form, dim):
        x = torch.from_numpy(blocks.piece("blocks apart", 256))
        key = random_bits(3, 1, x.shape)
        for bits in (None, key):
            turned = x if dim in (-1, 1) else x.t().contiguous()
            turned_bits = (
                None if bits is None else (bits if dim in (-1, 1) else bits.t().contiguous())
            )
            want = form.quantize(turned, bits=turned_bits)
            got = form.quantize(x, dim, bits=bits)
            undo = (lambda t: t) if dim in (-1, 1) else (lambda t: t.t() if t.ndim else t)
            assert torch.equal(undo(got.codes.view(torch.uint8)), want.codes.view(torch.uint8))
            assert torch.equal(undo(got.scales.float()), want.scales.float())
            assert torch.equal(undo(got.dequantize()), want.dequantize())

    every(itertools.product(ALL, (-1, -2, 0, 1)), check)


def test_strides_batches_and_dtypes_make_no_difference():
    def check(form, dtype):
        x = torch.from_numpy(blocks.piece("wide bf16", 512)).to(dtype)
        want = form.quantize(x.float())
        sparse = torch.zeros(512, 1024, dtype=dtype)
        sparse[:, ::2] = x
        for view in (x, x.t().contiguous().t(), sparse[:, ::2]):
            got = form.quantize(view)
            assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
            assert torch.equal(got.scales, want.scales)
        if form.block is not None and form.rule != "two-level":  # no scale over the whole tensor
            batch = form.quantize(x.view(4, 128, 512))
            assert torch.equal(
                batch.codes.view(torch.uint8).flatten(0, 1), want.codes.view(torch.uint8)
            )

    every(itertools.product(ALL, (torch.float32, torch.bfloat16, torch.float16)), check)


def test_what_does_not_fit_is_refused_with_sizes_and_what_to_do():
    words = r"has 100 there \(shape \(4, 100\)\); pad it to 112, or keep this layer in bf16"
    with pytest.raises(PrecisionError, match=f"blocks of 16 along dim 1, and the tensor {words}"):
        NVFP4.quantize(torch.zeros(4, 100))
    with pytest.raises(PrecisionError, match=r"blocks of 16 along dim 0, and the tensor has 40"):
        BLOCK_FORMATS["nvfp4-2d"].quantize(torch.zeros(40, 64))
    with pytest.raises(
        PrecisionError, match=r"fp32, bf16 or fp16, and the tensor is torch\.float64"
    ):
        MXFP8.quantize(torch.zeros(32, dtype=torch.float64))
    for form, shape, dim in ((BLOCK_FORMATS["nvfp4-2d"], (16,), -1), (MXFP8, (4, 32), 2)):
        with pytest.raises(PrecisionError, match=r"and the tensor's shape is"):
            form.quantize(torch.zeros(shape), dim)
    for form in ALL:  # an expert without a token
        assert form.quantize(torch.zeros(0, 512)).dequantize().shape == (0, 512)


# Numbers that are not finite, or beyond


def test_a_block_with_a_number_that_is_not_finite_becomes_nan_and_no_other():
    def check(form, bad, dtype):
        x = torch.from_numpy(blocks.piece("narrow bf16", 256)).to(dtype)
        clean = x.clone()
        x[130, 40] = bad
        rows, columns = form.block or (256, 256)
        block = (
            slice(130 // rows * rows, 130 // rows * rows + rows),
            slice(40 // columns * columns, 40 // columns * columns + columns),
        )
        clean[block] = 0  # what two-level scales of the whole tensor are made of
        want = form.quantize(clean).dequantize()
        want[block] = math.nan
        found = form.quantize(x)
        assert equal(found.dequantize(), want)
        if form.element is not E2M1:
            assert found.codes[block].float().isnan().all()

    every(
        itertools.product(ALL, (math.inf, -math.inf, math.nan), (torch.float32, torch.bfloat16)),
        check,
    )


# Stochastic rounding


@pytest.mark.parametrize(
    "form",
    [f if f.name in ("mxfp8", "nvfp4") else pytest.param(f, marks=pytest.mark.slow) for f in ALL],
    ids=lambda form: form.name,
)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(form):
    x = torch.from_numpy(blocks.piece("narrow", 256))
    _, y = form._scaled(x, -1)
    inside = form.join(y, -1).double().numpy()
    table = blocks.ELEMENTS[form.element.name]
    low, high = blocks.floats.bracket(inside, table)
    total, draws = np.zeros_like(inside), 64
    for draw in range(draws):
        q = form.quantize(x, bits=random_bits(draw, 7, x.shape))
        codes = q.codes.view(torch.uint8).numpy()
        got = blocks.element_numbers(codes, form.element.name)
        assert ((got == low) | (got == high)).all()
        total += got
    gap = high - low
    share = np.where(gap > 0, (inside - low) / np.where(gap > 0, gap, 1), 0)
    # The mean error in standard deviations of the sum of independent draws: 5 of them.
    spread = math.sqrt((gap**2 * share * (1 - share)).sum() * draws)
    assert abs((total - draws * inside).sum()) < 5 * spread
    chi = ((total - draws * inside) ** 2)[gap > 0].sum() / (
        draws * (gap**2 * share * (1 - share))[gap > 0].sum()
    )
    assert 0.95 < chi < 1.05  # 65,536 elements: the variance is that of one coin each


def test_stochastic_bits_decide_by_their_upper_24():
    x = torch.tensor([[6.0, 2.25] + [0.0] * 14])  # a quarter of the way from 2 to 3
    form = replace(NVFP4, rule="rceil")
    for bits, result in ((0, 3.0), ((1 << 30) - 256, 3.0), (1 << 30, 2.0), (-1, 2.0)):
        draw = torch.full(x.shape, bits, dtype=torch.int32)
        assert form.quantize(x, bits=draw).dequantize()[0, 1] == result


# Scales as a format


def test_e8m0_holds_every_power_of_two_that_torch_stores():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    want = codes.view(torch.float8_e8m0fnu).float()
    assert equal(E8M0.decode(codes), want)
    powers = want[:255]
    assert torch.equal(E8M0.encode(powers).int(), codes[:255].int())
    above = torch.nextafter(powers, torch.tensor(math.inf))
    assert torch.equal(E8M0.encode(above).int(), codes[1:].int())
    special = torch.tensor([math.nan, math.inf, 0.0, 2.0**-149, 3 * 2.0**-128])
    assert E8M0.encode(special).tolist() == [255, 255, 0, 0, 1]


def test_the_examples():
    assert doctest.testmod(halfstep.formats.blocks).failed == 0
