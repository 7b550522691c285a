"""How a tensor's numbers are spread over the binary exponents, in one pass over its memory.

A row of 284 fp64 numbers holds what is counted: zeros; one count for each exponent from -149 (the
smallest fp32 number) to 127; infinities; NaN; the sum of the finite squares; the largest finite
magnitude; whether all numbers are bf16 or fp16 numbers, whatever they are kept in. Counts and sums
of several tensors add up in one row. :func:`add_` is for every device; on a CPU the compiled kernel
of ``exponents.cpp`` does the same in about 0.4 ns a number.

**Source:** IEEE 754-2019, 3.3: a number m 2^e with 1 <= m < 2 has the exponent e; fp32's
subnormal numbers have those from -149 to -127.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from halfstep.kernels.library import address, load_library

LEAST, MOST = -149, 127
"""The exponents of the smallest and of the largest fp32 number."""
ZEROS, FIRST, INFINITE, NOT_A_NUMBER = 0, 1, 278, 279
"""Positions in a row; the exponent e is at ``FIRST + e - LEAST``."""
SQUARES, LARGEST, SUBNORMAL, DIGITS, ROW = 280, 281, 282, 283, 284
"""The sum of the finite squares; the largest finite magnitude; numbers that were subnormal before
:func:`add_` multiplied them; the mantissa bits in use, 7 (as in bf16), 10 (as in fp16) or 23; and
the length of a row."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_COPIES = 64
_AT_ONCE = 1 << 22


@cache
def kernel() -> ctypes.CDLL | str:
    """The compiled kernel's library, or the reason why there is none."""
    found = load_library(("kernels/exponents.cpp", "kernels/vectors.h"), fused=True)
    if not isinstance(found, str):
        address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        found.halfstep_exponents.argtypes = (address, address, number, count, address, number)
        found.halfstep_exponents.restype = None
    return found


def empty_row(device: torch.device) -> Tensor:
    """A row in which nothing has been counted."""
    return torch.zeros(ROW, dtype=torch.float64, device=device)


@torch.no_grad()
def add_(row: Tensor, x: Tensor, factor: float = 1.0) -> None:
    """Count a tensor's numbers in a row; nothing waits for the device.

    Args:
        row: ``(284,)`` fp64, from :func:`empty_row`, on the tensor's device.
        x: Floating-point, of any shape and layout. Exponents of fp64 numbers beyond those of fp32
            count as the nearest that fp32 has.
        factor: Multiplies each number first, rounded to fp32. A factor of 1 costs nothing;
            multiply by powers of two afterwards instead, by moving the counts.
    """
    x = x.detach()
    if factor != 1.0:
        least = torch.finfo(x.dtype).smallest_normal
        magnitude = x.abs() if x.dtype.itemsize > 1 else x.float().abs()
        row[SUBNORMAL] += ((magnitude > 0) & (magnitude < least)).sum()
        x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) * factor
    library = _kernel_for(x)
    if library is None:
        add_by_torch_(row, x)
        return
    if not _is_dense(x):
        x = x.contiguous()
    _run(library, row, x)


@torch.no_grad()
def add_difference_(row: Tensor, x: Tensor, less: Tensor) -> None:
    """Count the numbers of ``x - less``, computed in fp32, or in fp64 where one of them is.

    Args:
        row: As of :func:`add_`.
        x: Likewise.
        less: Of the shape of ``x``, and on its device.
    """
    x, less = x.detach(), less.detach()
    library = _kernel_for(x)
    if library is None or less.dtype != x.dtype:
        wide = torch.promote_types(torch.promote_types(x.dtype, less.dtype), torch.float32)
        add_(row, x.to(wide) - less.to(wide))
        return
    if not _is_dense(x) or less.stride() != x.stride():
        x, less = x.contiguous(), less.contiguous()
    _run(library, row, x, less)


def _kernel_for(x: Tensor) -> ctypes.CDLL | None:
    library = kernel() if x.device.type == "cpu" and x.dtype in _KINDS and x.numel() else ""
    return None if isinstance(library, str) else library


def _run(library: ctypes.CDLL, row: Tensor, x: Tensor, less: Tensor | None = None) -> None:
    n, dtype = x.numel(), x.dtype  # dense in whichever order of dims: read as a row
    other = None if less is None else less.as_strided((less.numel(),), (1,))
    library.halfstep_exponents(
        address(x.as_strided((n,), (1,)), n, dtype), address(other, n, dtype), _KINDS[dtype],
        n, address(row, ROW, torch.float64), torch.get_num_threads(),
    )  # fmt: skip


def add_by_torch_(row: Tensor, x: Tensor) -> None:
    """What :func:`add_` counts, in torch's operations; the definition of the compiled kernel."""
    if x.numel() == 0:
        return
    for part in torch.split(x.reshape(-1), _AT_ONCE):
        magnitude = (part if part.dtype == torch.float64 else part.float()).abs()
        finite = magnitude.isfinite()
        numbers = torch.where(finite, magnitude, 0.0)
        exponent = torch.frexp(numbers).exponent - 1  # frexp has mantissas from 1/2 to 1
        at = exponent.clamp(LEAST, MOST) + (FIRST - LEAST)
        at = torch.where(numbers == 0, ZEROS, at)
        at = torch.where(finite, at, torch.where(magnitude.isnan(), NOT_A_NUMBER, INFINITE))
        # Many threads of a GPU that add to one count wait for each other, so there are copies.
        copy = torch.arange(len(at), device=at.device) % _COPIES
        counts = torch.zeros(_COPIES * SQUARES, dtype=torch.int64, device=at.device)
        counts.scatter_add_(0, at + copy * SQUARES, torch.ones_like(copy))
        row[:SQUARES] += counts.view(_COPIES, SQUARES).sum(0)
        row[SQUARES] += numbers.double().square().sum()
        row[LARGEST] = torch.maximum(row[LARGEST], numbers.amax().double())
        bits = magnitude.float().view(torch.int32)
        digits = torch.where(bits & 0x1FFF != 0, 23, torch.where(bits & 0xFFFF != 0, 10, 7))
        row[DIGITS] = torch.maximum(row[DIGITS], digits.amax().double())


def _is_dense(x: Tensor) -> bool:
    """Whether the tensor's numbers fill its memory without gaps, in whatever order."""
    if x.is_contiguous():
        return True
    strides = x.stride()
    return x.permute(sorted(range(x.ndim), key=lambda dim: -strides[dim])).is_contiguous()
