"""Counting exponents by torch's operations, against bits read by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep.diagnostics.statistics.values import (
    DIGITS,
    FIRST,
    INFINITE,
    LARGEST,
    LEAST,
    NOT_A_NUMBER,
    ROW,
    SQUARES,
    ZEROS,
    count_into_,
)


def empty_row() -> Tensor:
    return torch.zeros(ROW, dtype=torch.float64)


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


def test_fp32_patterns():
    x = fp32_patterns()
    row = empty_row()
    count_into_(row, x)
    same(row, oracle(x))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bits(dtype):
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    row = empty_row()
    count_into_(row, x)
    same(row, oracle(x))


def test_fp32_numbers_that_have_been_through_16_bits():
    for dtype, digits in ((torch.bfloat16, 7), (torch.float16, 10), (torch.float32, 23)):
        row = empty_row()
        count_into_(row, torch.linspace(-1, 1, 777).to(dtype).float())
        assert row[DIGITS] == digits
        count_into_(row, torch.ones(3))
        assert row[DIGITS] == digits


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
    row = empty_row()
    count_into_(row, x)
    same(row, oracle(x))
