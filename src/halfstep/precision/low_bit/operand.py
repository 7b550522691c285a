"""Rounds an operand of a product to a block format: by the compiled kernel, or in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.formats.blocks import BLOCK_FORMATS, BlockFormat, Quantized, outer_scale, scales_of
from halfstep.kernels import blocks
from halfstep.precision.masters.rounding import random_bits, random_key

Operand = tuple[Tensor, Tensor | None]
"""Numbers in bf16, and the scale of all of them if there is one; or in fp32, scaled by blocks."""
Draw = tuple[int, int, int]
"""Seed, step and stream of random bits."""


def operand(name: str, x: Tensor, dim: int, draw: Draw | None = None) -> Operand:
    """Round a matrix to a block format.

    Args:
        name: Of the format, an entry of ``BLOCK_FORMATS``.
        x: bf16 or fp32, ``(rows, columns)``.
        dim: The dim that the product sums over, along which blocks lie.
        draw: Which random bits round it; None rounds to nearest.

    Returns:
        What a matmul multiplies, and what is left to multiply its result by.
    """
    form = BLOCK_FORMATS[name]
    if draw is None and not x.is_contiguous() and x.t().is_contiguous():
        values, left = operand(name, x.t(), 1 - dim)
        return values.t(), left
    x = x.contiguous()
    if blocks.fits(x):
        form.check(x.shape, x.dtype, dim)
        return _by_kernel(form, x, dim, draw)
    values, left = form.operand(x, dim, bits=_bits(x, draw))
    if left is not None and left.dim():
        return form.join(form.split(values, dim) * form.spread(left, dim), dim), None
    return values.to(torch.bfloat16), left


def quantized(name: str, x: Tensor, dim: int, draw: Draw | None = None) -> Quantized:
    """The codes and scales that :func:`operand` stands for, for a native product."""
    return BLOCK_FORMATS[name].quantize(x, dim, bits=_bits(x, draw))


def _bits(x: Tensor, draw: Draw | None) -> Tensor | None:
    if draw is None:
        return None
    return random_bits(draw[0], draw[1], x.shape, stream=draw[2], device=x.device)


def _by_kernel(form: BlockFormat, x: Tensor, dim: int, draw: Draw | None) -> Operand:
    """The same on a CPU; equal bit by bit."""
    block: tuple[int, int] = (x.shape[0], x.shape[1])
    if form.block is not None:
        block = form.block if dim == 1 else (form.block[1], form.block[0])
    element, left = form.element, None
    largest = blocks.largest(x, block)
    if form.rule == "amax":
        found = scales_of(form, largest, None)
        encode, left = found.encode, found.decode
        decode = left if form.block is not None else torch.ones_like(left)
    else:
        outer = 1.0
        if form.rule == "two-level":
            whole = outer_scale(form, largest)
            outer, left = float(whole), 1.0 / whole
        encode, decode = blocks.scales(largest, form.rule, element.max, outer)
    by_blocks = form.rule == "amax" and form.block is not None
    values = blocks.rounded(
        x,
        block,
        encode,
        decode,
        (element.mantissa_bits, element.max, element.min_exponent),
        None if draw is None else random_key(*draw),
        torch.float32 if by_blocks else torch.bfloat16,
    )
    if left is None or by_blocks:
        return values, None
    return values, left.reshape(())
