"""Products of matrices in formats below 16 bits, as a tensor core computes them, on any device.

A tensor core multiplies codes exactly, adds up in fp32, and multiplies by the scales. Codes with
their block scales are bf16 numbers (``formats/blocks.py``), so that a bf16 product does the same::

    mx         the bf16 product of the dequantised operands, rounded once to the output's dtype
    fp8        the bf16 product of the codes, added up in fp32, times the scales of both tensors
    nvfp4      the bf16 product of codes times block scales, times the outer scales of both
    fp8-block  one such product for each 128 of K, times the blocks' scales, added up in fp32

**Error.** Products of two bf16 numbers are exact in fp32. With u = 2^-24, n products added up in
fp32 in any order are off by at most n u / (1 - n u) times the sum of their magnitudes (Higham,
"Accuracy and Stability of Numerical Algorithms", 2nd ed., 3.1); scales add at most 3 roundings, so
that n is K + 3, and the output's dtype one, of half its gap. Tensor cores align the products of 16
or 32 numbers and cut them off: their sums have an error of their own (docs/low-bit.md).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.formats import BlockFormat, block_format
from halfstep.precision.masters.rounding import random_bits

_ONE_AT_A_TIME = threading.Lock()


def operand_bits(
    seed: int, step: int, module: str, product: str, x: Tensor, *, operand: str = ""
) -> Tensor:
    """The random bits of one operand's stochastic rounding, equal in a replay and after a resume.

    Args:
        seed: The run's.
        step: The number of the optimizer step.
        module: The module's name in the model.
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        x: The operand, for its shape and device; its memory layout makes no difference.
        operand: Tells the operands of one product apart, where both are rounded.

    Returns:
        int32, in the shape of ``x``.
    """
    stream = zlib.crc32("\0".join((module, product, operand)).encode())
    return random_bits(seed, step, x.shape, stream=stream, device=x.device)


@torch.no_grad()
def block_product(
    a: Tensor,
    b: Tensor,
    form: BlockFormat | str,
    b_form: BlockFormat | str | None = None,
    *,
    a_bits: Tensor | None = None,
    b_bits: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product ``a @ b`` of two matrices that are first rounded to block formats.

    Args:
        a: (..., M, K), fp32, bf16 or fp16; blocks lie along K.
        b: (K, N), likewise.
        form: The format of ``a``, and of ``b`` unless that has one of its own.
        b_form: The format of ``b``.
        a_bits: Random bits of the shape of ``a``, from :func:`operand_bits`, to round it
            stochastically; None rounds to nearest.
        b_bits: The same for ``b``.
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
    row_bits = None if a_bits is None else a_bits.reshape(rows.shape)
    left, left_scales = form.operand(rows, -1, bits=row_bits)
    right, right_scales = other.operand(b, -2, bits=b_bits)
    if left_scales is None and right_scales is None and out_dtype == torch.bfloat16:
        out = left.bfloat16() @ right.bfloat16()
        return out.reshape(*a.shape[:-1], -1)
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
    for scale in (left, right):
        out = out if scale is None else out * scale
    return out


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """The fp32 product of two fp32 matrices whose numbers bf16 holds, by bf16 instructions."""
    if a.device.type == "cuda":
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    with _bf16_instructions():
        return a @ b


@contextmanager
def _bf16_instructions() -> Iterator[None]:
    """A CPU multiplies fp32 matrices as bf16 numbers, where it can; other threads wait.

    torch has this as a setting of the whole process, so it is on for one product at a time.
    """
    backend: Any = torch.backends.mkldnn
    settings = backend.matmul
    with _ONE_AT_A_TIME:
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before
