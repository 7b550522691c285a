"""Products of matrices in formats below 16 bits, as a tensor core computes them, on any device.

A tensor core multiplies codes exactly, adds up in fp32, and multiplies by the scales. Codes with
their block scales are bf16 numbers (``formats/blocks.py``), so that a bf16 product does the same::

    mx         the bf16 product of the dequantised operands, rounded once to the output's dtype
    fp8        the product of the codes, added up in fp32, times the scales of both tensors
    nvfp4      the product of codes times block scales, times the outer scales of both tensors
    fp8-block  one such product for each 128 of K, times the blocks' scales, added up in fp32

Where scales are left, the sums must come in fp32. CUDA multiplies bf16 matrices so; a CPU runs its
fp32 product, whose operands hold the same numbers.

**Error.** Products of two bf16 numbers are exact in fp32. With u = 2^-24, n products added up in
fp32 in any order are off by at most n u / (1 - n u) times the sum of their magnitudes (Higham,
"Accuracy and Stability of Numerical Algorithms", 2nd ed., 3.1); scales add at most 3 roundings, so
that n is K + 3, and the output's dtype one, of half its gap. Tensor cores align the products of 16
or 32 numbers and cut them off: their sums have an error of their own (docs/low-bit.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.formats import E8M0, BlockFormat, Quantized, block_format
from halfstep.precision.low_bit.hadamard import mixed
from halfstep.precision.masters.rounding import random_bits

Draw = tuple[int, int, int]
"""Seed, step and stream: what the random bits of an operand are a pure function of."""


@torch.no_grad()
def block_product(
    a: Tensor,
    b: Tensor,
    form: BlockFormat | str,
    b_form: BlockFormat | str | None = None,
    *,
    a_draw: Draw | None = None,
    b_draw: Draw | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product ``a @ b`` of two matrices that are first rounded to block formats.

    Args:
        a: (..., M, K), fp32, bf16 or fp16; blocks lie along K.
        b: (K, N), likewise.
        form: The format of ``a``, and of ``b`` unless that has one of its own.
        b_form: The format of ``b``.
        a_draw: The random bits that round ``a`` stochastically; None rounds to nearest.
        b_draw: The same for ``b``.
        out_dtype: The result's; default: that of ``a``.

    Returns:
        (..., M, N).

    Raises:
        PrecisionError: If K is not a multiple of the blocks, or the two formats' blocks have scales
            of different lengths that a sum cannot be cut by.

    Example:
        >>> block_product(torch.ones(1, 32), torch.ones(32, 1), "mxfp8").item()
        32.0
    """
    form = block_format(form)
    other = form if b_form is None else block_format(b_form)
    out_dtype = out_dtype or a.dtype
    rows = a.reshape(-1, a.shape[-1])
    mx = form.scale is E8M0 and other.scale is E8M0
    dtype = torch.bfloat16 if mx and out_dtype == torch.bfloat16 else torch.float32
    left, left_scales = operand(form, rows, -1, dtype, a_draw)
    right, right_scales = operand(other, b, -2, dtype, b_draw)
    if dtype == torch.bfloat16:
        return (left @ right).reshape(*a.shape[:-1], -1)
    length = _length(form, left_scales) or _length(other, right_scales)
    if length != (_length(other, right_scales) or length):
        raise PrecisionError(
            f"{form.name} has a scale for each {length} of K and {other.name} for each "
            f"{_length(other, right_scales)}; take blocks of one length"
        )
    if not length:
        out = _scaled(_fp32_product(left, right), left_scales, right_scales)
    else:
        out = torch.zeros(left.shape[0], right.shape[1], device=left.device)
        for at in range(0, left.shape[1], length):
            part = _fp32_product(left[:, at : at + length], right[at : at + length])
            by_row = _of_block(left_scales, at // length, 1, left.shape[0])
            by_column = _of_block(right_scales, at // length, 0, right.shape[1])
            out += _scaled(part, by_row, by_column)
    return out.to(out_dtype).reshape(*a.shape[:-1], -1)


def operand(
    form: BlockFormat,
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    draw: Draw | None = None,
    *,
    rows: int | None = None,
    mix: bool = False,
    scaled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:meth:`BlockFormat.operand` of a matrix that is filled up and mixed first.

    Args:
        form: The format.
        x: (rows, columns).
        dim: -1 or -2, along which blocks lie.
        dtype: bf16 or fp32, of the values.
        draw: The random bits that round it stochastically; None rounds to nearest.
        rows: How many rows the result has: those of ``x``, and zeros.
        mix: Whether the rows, tokens in bf16, are mixed first; see ``hadamard.py``.
        scaled: Whether values are multiplied by fp32 scales of blocks, so that none are left.

    Returns:
        The values, and the scales that are left to multiply by.
    """
    given, columns = x.shape
    rows = given if rows is None else rows
    form.check((rows, columns), x.dtype, dim)
    x = filled(x, rows, mix)
    bits = None if draw is None else bits_of(draw, x)
    values, left = form.operand(x, dim, bits=bits)
    if scaled and left is not None and left.ndim:
        values, left = form.times(values, left, dim), None
    return values.to(dtype), left


def filled(x: Tensor, rows: int, mix: bool) -> Tensor:
    """``x`` with rows of zeros up to a number, and its tokens mixed if they are to be."""
    x = F.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x
    return mixed(x) if mix else x


def quantized(name: str, x: Tensor, dim: int, draw: Draw | None = None) -> Quantized:
    """The codes and scales that :func:`operand` stands for, for a native product."""
    bits = None if draw is None else bits_of(draw, x)
    return block_format(name).quantize(x, dim, bits=bits)


def bits_of(draw: Draw, x: Tensor) -> Tensor:
    """int32 random bits in the shape of ``x``; its memory layout makes no difference."""
    seed, step, stream = draw
    return random_bits(seed, step, x.shape, stream=stream, device=x.device)


def _length(form: BlockFormat, scales: Tensor | None) -> int:
    """How many numbers along K share a scale that a sum must be cut for; 0 for none."""
    return 0 if form.block is None or scales is None or scales.ndim == 0 else form.block[1]


def _of_block(scales: Tensor | None, at: int, dim: int, size: int) -> Tensor | None:
    """The scales of one block along K, for each row or column, as a factor of the product."""
    if scales is None or scales.ndim == 0:
        return scales
    some = scales.select(dim, at)
    return some.repeat_interleave(size // len(some)).unsqueeze(dim)  # tall blocks: for several


def _scaled(out: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """The product, multiplied in place by the scales that are left."""
    for scale in (left, right):
        if scale is not None:
            out.mul_(scale)
    return out


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """The fp32 product of two fp32 matrices whose numbers bf16 holds."""
    if a.device.type == "cuda":
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    return a @ b  # torch has no bf16 product with an fp32 result on a CPU
