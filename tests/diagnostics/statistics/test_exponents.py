"""Counting exponents: the compiled kernel and torch's operations against bits read by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep.kernels import exponents
from halfstep.kernels.exponents import (
    DIGITS,
    FIRST,
    INFINITE,
    LARGEST,
    LEAST,
    NOT_A_NUMBER,
    ROW,
    SQUARES,
    SUBNORMAL,
    ZEROS,
    add_,
    add_by_torch_,
    add_difference_,
    empty_row,
)

CPU = torch.device("cpu")
LOW = (torch.bfloat16, torch.float16)


def oracle(x: Tensor) -> np.ndarray:
    """The row by its definition, number by number, from Python's floats."""
    row = np.zeros(ROW)
    for value in x.detach().double().reshape(-1).tolist():
        if value != value:
            row[NOT_A_NUMBER] += 1
        elif abs(value) == np.inf:
            row[INFINITE] += 1
        elif value == 0:
            row[ZEROS] += 1
        else:
            row[FIRST + int(np.frexp(abs(value))[1]) - 1 - LEAST] += 1
            row[SQUARES] += value * value
            row[LARGEST] = max(row[LARGEST], abs(value))
    if x.numel():  # how many of the 24 bits of a finite number, or of a NaN's, are not needed
        bits = x.detach().float().contiguous().view(torch.int32)
        digits = {16: 7, 13: 10, 0: 23}
        row[DIGITS] = digits[next(low for low in digits if not (bits % 2**low).any())]
    return row


def every_pattern(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def fp32_patterns() -> Tensor:
    """Both signs of every exponent with its first and last mantissas; subnormals of all sizes."""
    words = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64)
    edges = [f << 23 | m for f in range(512) for m in (0, 1, 0x400000, 0x7FFFFF)]
    small = [1 << bit for bit in range(23)] + [(1 << bit) - 1 for bit in range(1, 24)]
    bits = np.concatenate([words, np.array(edges + small, dtype=np.uint64)]).astype(np.uint32)
    return torch.from_numpy(bits.view(np.float32).copy())


def same(row: Tensor, want: np.ndarray) -> None:
    got = row.numpy()
    np.testing.assert_array_equal(np.delete(got, SQUARES), np.delete(want, SQUARES))
    # fp64 sums in two orders: 2^-53 times the count of additions, generously
    np.testing.assert_allclose(got[SQUARES], want[SQUARES], rtol=1e-11)


@pytest.mark.parametrize("count", [add_, add_by_torch_])
@pytest.mark.parametrize("dtype", LOW)
def test_every_pattern_of_16_bits(count, dtype):
    x = every_pattern(dtype)
    row = empty_row(CPU)
    count(row, x)
    same(row, oracle(x))


@pytest.mark.parametrize("count", [add_, add_by_torch_])
def test_fp32_patterns(count):
    x = fp32_patterns()
    row = empty_row(CPU)
    count(row, x)
    same(row, oracle(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
@pytest.mark.parametrize("lay", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::3]])
def test_differences_are_those_of_wide_numbers(dtype, lay):
    """Equal numbers, infinities, NaN and subnormal differences among them."""
    generator = torch.Generator().manual_seed(1)
    x, less = (torch.randn(90, 99, generator=generator).to(dtype) for _ in range(2))
    less[:30] = x[:30]
    tiny = max(torch.finfo(dtype).smallest_normal, 2.0**-126)
    x[0, :9], less[0, :9] = 1.5 * tiny, tiny
    x[1, 0], less[1, 0], x[1, 3], less[1, 6], x[1, 9] = 3e4, -3e4, np.inf, np.inf, np.nan
    wide = torch.promote_types(dtype, torch.float32)
    row = empty_row(CPU)
    add_difference_(row, lay(x), lay(less))
    same(row, oracle(lay(x).to(wide) - lay(less).to(wide)))
    row = empty_row(CPU)
    add_difference_(row, lay(x), lay(less).contiguous().double())  # other strides, another dtype
    want = empty_row(CPU)
    add_(want, lay(x).double() - lay(less).double())
    same(row, want.numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bits(dtype):
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    row = empty_row(CPU)
    add_(row, x)
    same(row, oracle(x))


@pytest.mark.parametrize("count", [add_, add_by_torch_])
def test_fp32_numbers_that_have_been_through_16_bits(count):
    for dtype, digits in ((torch.bfloat16, 7), (torch.float16, 10), (torch.float32, 23)):
        row = empty_row(CPU)
        count(row, torch.linspace(-1, 1, 777).to(dtype).float())
        assert row[DIGITS] == digits
        count(row, torch.ones(3))
        assert row[DIGITS] == digits


def test_fp64_beyond_the_exponents_of_fp32_counts_at_their_ends():
    row = empty_row(CPU)
    add_(row, torch.tensor([1e300, -1e-300, 0.0, 3.0], dtype=torch.float64))
    assert row[FIRST + 127 - LEAST] == row[FIRST] == row[ZEROS] == row[FIRST + 1 - LEAST] == 1
    assert row[LARGEST] == 1e300


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 33, 4095, 4096, 4097, 70_001])
def test_sizes_that_are_no_multiple_of_anything(dtype, size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    row = empty_row(CPU)
    add_(row, x)
    want = empty_row(CPU)
    add_by_torch_(want, x)
    same(row, want.numpy())


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x[0].expand(9, -1),
        lambda x: x.reshape(2, 3, 4, -1).contiguous(memory_format=torch.channels_last),
        lambda x: x.reshape(2, 3, 4, -1).permute(2, 0, 3, 1),
        lambda x: x[3, 4],
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "permuted", "scalar"],
)
def test_layouts(layout):
    x = layout(torch.randn(24, 50).to(torch.bfloat16))
    row = empty_row(CPU)
    add_(row, x)
    same(row, oracle(x))


def test_several_tensors_add_up_and_threads_give_the_same_bits():
    x = torch.randn(100_000)
    one, two, both = empty_row(CPU), empty_row(CPU), empty_row(CPU)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        add_(one, x)
        add_(two, x)
        add_(both, x[:40_000])
        add_(both, x[40_000:])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)
    same(both, oracle(x))


@pytest.mark.parametrize("dtype", [torch.float32, *LOW, torch.float64])
def test_a_factor_that_is_no_power_of_two(dtype):
    x = torch.cat([torch.randn(500), torch.randn(500) * 2.0**-16]).to(dtype)
    x[::7] = 0
    row = empty_row(CPU)
    add_(row, x, 0.75)
    wide = x if dtype == torch.float64 else x.float()
    want = oracle(wide * 0.75)
    want[SUBNORMAL] = sum(0 < abs(v) < torch.finfo(dtype).smallest_normal for v in x.tolist())
    same(row, want)
    assert dtype != torch.float16 or want[SUBNORMAL] > 100


def test_flushed_denormals_are_still_counted():
    """A thread that flushes subnormal numbers in arithmetic must not lose them here."""
    x = every_pattern(torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    try:
        for values in (x, fp32_patterns()):
            row = empty_row(CPU)
            add_(row, values)
            torch.set_flush_denormal(False)
            want = oracle(values)
            torch.set_flush_denormal(True)
            counts = np.delete(row.numpy(), SQUARES)  # a subnormal's square is too small to matter
            np.testing.assert_array_equal(counts, np.delete(want, SQUARES))
    finally:
        torch.set_flush_denormal(False)


def test_the_kernel_runs_where_a_compiler_is(monkeypatch):
    if isinstance(exponents.kernel(), str):
        pytest.skip(exponents.kernel())

    def never(*_):
        raise AssertionError("torch's operations ran instead of the kernel")

    monkeypatch.setattr(exponents, "add_by_torch_", never)
    for dtype in (torch.float32, *LOW):
        add_(empty_row(CPU), torch.ones(3, dtype=dtype))
