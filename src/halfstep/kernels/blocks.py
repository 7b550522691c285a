"""Rounds matrices to block formats on a CPU, by ``blocks.cpp``.

Two passes over memory: :func:`largest` finds the blocks' largest magnitudes, :func:`scales` what
follows from them, and :func:`rounded` applies it. The definition is ``halfstep.formats``.

Shapes: R rows, C columns, in blocks of h rows and w columns.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from halfstep.kernels.library import load_library

_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SHAPE = (_ADDRESS, _INT, _COUNT, _COUNT, _COUNT, _COUNT)


@cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or the reason why there is none."""
    found = load_library(("kernels/blocks.cpp", "kernels/vectors.h"), fused=False)
    if not isinstance(found, str):
        found.halfstep_largest.argtypes = (*_SHAPE, _ADDRESS, _INT)
        found.halfstep_largest.restype = None
        found.halfstep_round_blocks.argtypes = (
            *(*_SHAPE, _ADDRESS, _ADDRESS, _INT, ctypes.c_float, _INT, _INT, ctypes.c_uint32),
            *(_ADDRESS, _INT, _INT),
        )
        found.halfstep_round_blocks.restype = None
        found.halfstep_scales.argtypes = (
            *(_ADDRESS, _COUNT, _INT, ctypes.c_float, ctypes.c_float, _ADDRESS, _ADDRESS),
        )
        found.halfstep_scales.restype = None
    return found


def fits(x: Tensor) -> bool:
    """Whether the kernel takes a matrix: dense, in bf16 or fp32, on a CPU with a compiler."""
    known = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) and x.dim() == 2
    return known and x.is_contiguous() and x.numel() > 0 and not isinstance(library(), str)


def largest(x_RC: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block, fp32 ``(ceil(R/h), ceil(C/w))``; NaN or inf wins."""
    rows, columns = x_RC.shape
    high, wide = block
    out = torch.empty(-(-rows // high), -(-columns // wide))
    _loaded().halfstep_largest(*_matrix(x_RC), high, wide, out.data_ptr(), torch.get_num_threads())
    return out


def scales(largest: Tensor, rule: str, top: float, outer: float = 1.0) -> tuple[Tensor, Tensor]:
    """What multiplies the numbers of each block before they are rounded, and afterwards.

    Args:
        largest: The blocks' largest magnitudes, from :func:`largest`.
        rule: An entry of :data:`RULES`.
        top: The largest number of the narrow format.
        outer: For ``two-level``, what multiplies the whole tensor first.
    """
    encode, decode = torch.empty_like(largest), torch.empty_like(largest)
    _loaded().halfstep_scales(
        *(largest.data_ptr(), largest.numel(), RULES.index(rule), top, outer),
        *(encode.data_ptr(), decode.data_ptr()),
    )
    return encode, decode


RULES = ("floor", "rceil", "two-level")
"""How the scales of blocks are found; see ``halfstep.formats``."""


def rounded(
    x_RC: Tensor,
    block: tuple[int, int],
    encode: Tensor,
    decode: Tensor,
    grid: tuple[int, float, int],
    key: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Each number times its block's ``encode``, rounded to a grid, times its ``decode``.

    Args:
        x_RC: The matrix.
        block: Rows and columns of a block.
        encode: fp32, contiguous, one for each block, as :func:`largest` returns them.
        decode: The same.
        grid: Of the narrow format: mantissa bits, largest number, exponent of the smallest normal
            number. What is beyond the largest becomes it.
        key: Of the random bits that round stochastically; None rounds to nearest, ties to even.
        dtype: Of the result: bf16, to which it is rounded to nearest, or fp32.
    """
    out = torch.empty_like(x_RC, dtype=dtype)
    mantissa, top, least = grid
    _loaded().halfstep_round_blocks(
        *(*_matrix(x_RC), *block, encode.data_ptr(), decode.data_ptr(), mantissa, top, least),
        *(key is not None, key or 0, out.data_ptr(), dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return out


def _matrix(x_RC: Tensor) -> tuple[int, bool, int, int]:
    return (x_RC.data_ptr(), x_RC.dtype == torch.bfloat16, *x_RC.shape)


def _loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, str), "fits() has said that there is one"
    return found
