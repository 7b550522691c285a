"""Exponents against bits read by Python, and what-ifs from them against real rounding."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from halfstep.diagnostics.statistics.values import ROW, TensorStatistics, count_into_
from halfstep.diagnostics.statistics.watch import Window, what_if, window
from halfstep.formats import BF16, E4M3FN, E5M2, FP16, FloatFormat

FORMATS = [FP16, BF16, E4M3FN, E5M2]


def statistics(x: Tensor, shift: int = 0, name: str = "w") -> TensorStatistics:
    row = torch.zeros(ROW, dtype=torch.float64)
    count_into_(row, x)
    return TensorStatistics.from_row("gradient", name, x.dtype, row.tolist(), 2.0**-shift)


def truth(x: Tensor, form: FloatFormat, k: int) -> tuple[float, float]:
    """By real rounding: the shares of what is finite and not 0 that are flushed and overflow."""
    wide = x.double()
    of = wide.isfinite() & (wide != 0)
    rounded = form.round_to(wide * 2.0**k)
    parts = (of & (rounded == 0), of & ~rounded.isfinite())
    return tuple(float(part.sum() / of.sum()) for part in parts)


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_random_tensors_within_a_fifth_of_a_point(form, spread):
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randn(200_000, generator=generator) * spread - 8)
    x = torch.randn(200_000, generator=generator) * size
    for k in (0, 8, 16):
        found, (flushed, overflowed) = what_if(statistics(x), form, k), truth(x, form, k)
        assert found.flushed == pytest.approx(flushed, abs=0.002)
        # Of the binade of the 8-bit formats' largest number a fifth or an eighth is beyond the
        # limit if it is spread evenly; where it holds a fifth of all numbers, that is 3 points.
        allowed = 0.03 if form in (E4M3FN, E5M2) else 0.002
        assert found.overflowed == pytest.approx(overflowed, abs=allowed)


@pytest.mark.covering
@pytest.mark.parametrize("form", [FP16, E5M2, E4M3FN], ids=lambda form: form.name)
@pytest.mark.parametrize("seed", range(6))
def test_the_window_is_where_real_rounding_says(form, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30_000, generator=generator) * 2.0 ** (-6 * seed)
    found = window([statistics(x)], form)
    fits = []
    for k in range(found.low - 3, found.high + 4):
        flushed, over = truth(x, form, k)
        fits.append((k, flushed <= 0.01 and not over))
    assert fits[0][1] is False or not found.fits
    real = [k for k, fit in fits if fit]
    # random fp32 numbers have no ties at the lower limit, so that the edges are exact
    assert (found.low, found.high) == (real[0], real[-1])


def test_a_window_is_of_all_gradients_together():
    small, large = torch.full((9,), 2.0**-30), torch.full((9,), 100.0)
    both = [statistics(small, name="a"), statistics(large, name="b")]
    assert window(both, FP16) == Window(6, 9, "b")
    assert window(both, FP16).fits
    assert window([], FP16) is None
    assert window([statistics(torch.zeros(3))], FP16) is None
    x = torch.cat([torch.full((50,), 2.0**-40), torch.full((50,), 1000.0)])
    found = window([statistics(x, name="head")], FP16)
    assert str(found) == "no scale fits: at least 2^15 is needed, and head allows 2^6 at most"


LIMITS = [
    *(2.0**e for e in (-149, -134, -133, -126, -25, -24, -17, -16, -14, -10, -9, -6, 0, 15, 127)),
    *(1.5 * 2.0**e for e in (-134, -25, -17, -10)),
    *(
        2.0**-25 * (1 + 2.0**-23),
        2.0**-14 - 2.0**-25,
        2.0**-14 - 2.0**-24,
        65504.0,
        65519.99,
        65520.0,
    ),
    *(448.0, 464.0, 464.0001, 57344.0, 61439.99, 61440.0, 3.3895314e38, 3.4028235e38),
]


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_equal_numbers_at_each_limit_are_exact(form):
    """As the gradients of a mean are: all in one place, with both signs and some zeros."""
    for value in LIMITS:
        x = torch.tensor([value, -value, value, 0.0, -0.0])
        row = statistics(x)
        assert row.zeros == 2
        for k in (0, -3, 7):
            scaled = float(x[0].double()) * 2.0**k
            rounded = float(form.round_to(torch.tensor(scaled, dtype=torch.float64)))
            found = what_if(row, form, k)
            assert found.flushed == (rounded == 0), (value, k)
            # how many of the limit's own binade overflow is an estimate; whether any does, is not
            assert (found.overflowed > 0) == (not math.isfinite(rounded)), (value, k)
        fit = window([row], form)
        for k, flushed in ((fit.low, False), (fit.low - 1, True)):
            rounded = form.round_to(x[0].double() * 2.0**k)
            assert (rounded == 0) == flushed, (value, k)
        for k, finite in ((fit.high, True), (fit.high + 1, False)):
            rounded = form.round_to(x[0].double() * 2.0**k)
            assert rounded.isfinite() == finite, (value, k)


def test_a_row_is_what_its_definition_says():
    """Of both signs of every exponent, subnormal numbers, 8-bit ones, and tensors of any layout."""
    draw = torch.Generator().manual_seed(0)
    edges = [(f << 23 | m) - 2**31 for f in range(512) for m in (0, 1, 0x400000, 0x7FFFFF)]
    small = [1 << bit for bit in range(23)] + [(1 << bit) - 1 for bit in range(1, 24)]
    bits = torch.tensor(edges + small, dtype=torch.int64).to(torch.int32)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    matrix = torch.randn(24, 50, generator=draw).to(torch.bfloat16)
    images = matrix.reshape(2, 3, 4, -1)
    for x in (
        *(bits.view(torch.float32), codes.view(torch.float8_e5m2), matrix.t(), matrix[3, 4]),
        *(matrix[::2, 1:], matrix[0].expand(9, -1), images.permute(2, 0, 3, 1)),
        *(images.contiguous(memory_format=torch.channels_last), torch.empty(0)),
    ):
        row = torch.zeros(ROW, dtype=torch.float64)
        count_into_(row, x)
        values = x.double().flatten().tolist()
        finite = [v for v in values if math.isfinite(v)]
        found = TensorStatistics.from_row("weight", "w", x.dtype, row.tolist())
        assert found.exponents == Counter(math.frexp(v)[1] - 1 for v in finite if v)
        assert found.zeros == finite.count(0.0)
        assert found.nan == sum(map(math.isnan, values))
        assert found.inf == sum(map(math.isinf, values))
        assert found.absmax == max(map(abs, finite), default=0)
        squares = math.fsum(v * v for v in finite) / max(len(finite), 1)
        assert found.rms == pytest.approx(math.sqrt(squares), rel=1e-9)  # fp64 sums
