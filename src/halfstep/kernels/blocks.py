"""Rounds matrices to block formats on a CPU, in one pass, and multiplies them: ``blocks.cpp``.

:meth:`halfstep.BlockFormat.operand` defines the rounding, and is what other devices run;
:func:`halfstep.precision.low_bit.product.block_product` defines the products.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.formats import BlockFormat
from halfstep.kernels.library import address, load_library, strided_address

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_RULES = {"floor": 0, "rceil": 1, "amax": 2, "two-level": 3}
_GIVEN = 4
_BF16, _FP32, _MIXED = torch.bfloat16, torch.float32, 16
_ADDRESS, _COUNT, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Job(ctypes.Structure):
    """The arguments of the kernel; ``blocks.cpp`` says what they are."""

    _fields_ = (
        *(("x", _ADDRESS), ("out", _ADDRESS), ("left", _ADDRESS)),
        *(("given", _COUNT), ("rows", _COUNT), ("columns", _COUNT)),
        *(("high", _COUNT), ("wide", _COUNT), ("signs", _ADDRESS)),
        *(("mantissa", _INT), ("least", _INT), ("top", _REAL)),
        *(("kind", _INT), ("out_kind", _INT), ("rule", _INT), ("scaled", _INT)),
        *(("has_amax", _INT), ("amax", _REAL)),
        *(("random", _INT), ("key", ctypes.c_uint32), ("threads", _INT)),
    )


class _Product(ctypes.Structure):
    """The arguments of a product; ``blocks.cpp`` says what they are."""

    _fields_ = (
        *(("a", _ADDRESS), ("b", _ADDRESS), ("bias", _ADDRESS)),
        *(("a_scales", _ADDRESS), ("b_scales", _ADDRESS), ("out", _ADDRESS)),
        *(("m", _COUNT), ("n", _COUNT), ("k", _COUNT), ("length", _COUNT)),
        *(("a_row", _COUNT), ("a_block", _COUNT), ("b_row", _COUNT), ("b_block", _COUNT)),
        *(("a_along", _INT), ("b_along", _INT), ("threads", _INT)),
    )


@cache
def kernel() -> ctypes.CDLL | str:
    """The compiled kernel's library, or the reason why there is none."""
    found = load_library(("kernels/blocks.cpp", "kernels/vectors.h"), fused=False)
    if not isinstance(found, str):
        found.halfstep_round_blocks.argtypes = (ctypes.POINTER(_Job),)
        found.halfstep_round_blocks.restype = None
        found.halfstep_product_by_blocks.argtypes = (ctypes.POINTER(_Product),)
        found.halfstep_product_by_blocks.restype = None
        found.halfstep_scale_rows.argtypes = (_ADDRESS, _COUNT, _COUNT, *(_ADDRESS,) * 3, _INT)
        found.halfstep_scale_rows.restype = None
    return found


def operand(
    form: BlockFormat,
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    *,
    key: int | None = None,
    amax: Tensor | None = None,
    rows: int | None = None,
    signs: Tensor | None = None,
    scaled: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """What :meth:`BlockFormat.operand` returns, bit for bit, or None where the kernel cannot run.

    Args:
        form: The format.
        x: (rows, columns) on a CPU, fp32 or bf16; ``form.check`` has passed the result's shape.
        dim: -1 or -2, along which blocks lie.
        dtype: Of the values: fp32 or bf16.
        key: Of the random bits of stochastic rounding, ``random_key(seed, step, stream)``; None
            rounds to nearest.
        amax: As there.
        rows: How many rows the result has: those of ``x``, and zeros.
        signs: fp32, (16,): each 16 rows go through the Hadamard matrix of these signs first,
            :func:`~halfstep.precision.low_bit.hadamard.mixed`. Of bf16 and blocks of 16 along -2.
        scaled: Whether values are multiplied by fp32 scales of blocks, so that none are left.
    """
    library = kernel()
    known = x.dtype in _KINDS and dtype in _KINDS and x.device.type == "cpu" and x.numel() > 0
    if isinstance(library, str) or not known:
        return None
    given, columns = x.shape
    rows = given if rows is None else rows
    plain = key is None and signs is None and rows == given
    if plain and not x.is_contiguous() and x.t().is_contiguous():
        found = operand(form, x.t(), -3 - dim, dtype, amax=amax, scaled=scaled)
        assert found is not None, "the kernel has no other conditions"
        values, left = found
        return values.t(), left.t() if left is not None and left.ndim == 2 else left
    x = x.contiguous()
    high, wide = form.block or (1, columns)
    if dim == -2 and form.block is not None:
        high, wide = wide, high
    values, left = torch.empty(rows, columns, dtype=dtype), None
    if form.has_tensor_scale:
        left = torch.empty(())
    elif form.rule == "amax" and not scaled:
        left = torch.empty(rows // high, columns // wide)
    blocks = 0 if left is None else -(-columns // wide) * (rows // high) if left.ndim else 1
    if rows % high or (signs is not None and (high, wide) != (_MIXED, 1)):
        raise PrecisionError(
            f"the kernel takes whole blocks, of {_MIXED}x1 where signs are given; got {rows} rows "
            f"in blocks of {high}x{wide}"
        )
    element = form.element
    job = _Job(
        *(address(x, given * columns, x.dtype), address(values, rows * columns, dtype)),
        *(address(left, blocks, _FP32), given, rows, columns),
        *(high, wide, address(signs, _MIXED, _FP32)),
        *(element.mantissa_bits, 127 + element.min_exponent, element.max),
        *(_KINDS[x.dtype], _KINDS[dtype], _GIVEN if form.block is None else _RULES[form.rule]),
        *(scaled, amax is not None, 0.0 if amax is None else amax.item()),
        *(key is not None, key or 0, torch.get_num_threads()),
    )
    library.halfstep_round_blocks(job)
    return values, left


def scaled_(
    product: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """A product in bf16, times the scales of its operands and plus a bias, in place.

    All of it is fp32, ``product * left * right + bias``, and rounded once at the end.

    Args:
        product: bf16, (rows, columns).
        left: fp32, 0-dim, or None.
        right: The same.
        bias: bf16, (columns,), or None.

    Returns:
        ``product``, or None where the kernel cannot run: it is as it was then.
    """
    library = kernel()
    if isinstance(library, str) or product.device.type != "cpu" or not product.is_contiguous():
        return None
    bias = None if bias is None else bias.contiguous()
    library.halfstep_scale_rows(
        *(address(product, product.numel(), _BF16), *product.shape),
        *(address(left, 1, _FP32), address(right, 1, _FP32)),
        *(address(bias, product.shape[1], _BF16), torch.get_num_threads()),
    )
    return product


def has_products() -> bool:
    """Whether :func:`product_by_blocks` can run: not where a mode wants to see torch's products."""
    library = kernel()
    if isinstance(library, str) or torch._C._len_torch_dispatch_stack():
        return False
    return bool(library.halfstep_has_dot())


def product_by_blocks(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], length: int, bias: Tensor | None
) -> Tensor:
    """``a @ b.t()`` in bf16 on a CPU, of numbers whose scales are fp32 numbers of blocks.

    The sum over each block of K is made by bf16 products, in fp32, and multiplied by the two
    scales; these sums and the bias are added in fp32, and rounded once.

    Args:
        a: bf16 (M, K), of any layout, and fp32 (M, K / length).
        b: bf16 (N, K) and fp32 (N, K / length).
        length: Of a block, a multiple of 32.
        bias: bf16, (N,), or None.

    Returns:
        (M, N).
    """
    library = kernel()
    assert not isinstance(library, str), "has_products() says whether there is a library"
    (left, a_scales), (right, b_scales) = a, b
    left, a_along = _laid(left)
    right, b_along = _laid(right)
    (m, k), n = left.shape, right.shape[0]
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(m, n, dtype=_BF16)
    if k % length or length % 32:
        raise PrecisionError(
            f"the kernel takes blocks of a multiple of 32 that divides K; got {length}, {k}"
        )
    left_view, right_view = (left if a_along else left.t()), (right if b_along else right.t())
    job = _Product(
        *(address(left_view, m * k, _BF16), address(right_view, n * k, _BF16)),
        address(bias, n, _BF16),
        strided_address(a_scales, (m, k // length), _FP32, rows=False),
        strided_address(b_scales, (n, k // length), _FP32, rows=False),
        *(address(out, m * n, _BF16), m, n, k, length),
        *(*a_scales.stride(), *b_scales.stride(), a_along, b_along, torch.get_num_threads()),
    )
    library.halfstep_product_by_blocks(job)
    return out


def _laid(x: Tensor) -> tuple[Tensor, bool]:
    """A matrix whose numbers are adjacent along one dim, and whether that is the last."""
    if not x.is_contiguous() and x.t().is_contiguous():
        return x, False
    return x.contiguous(), True
