"""Rounds matrices to block formats on a CPU, in one pass: ``formats/blocks.py``, compiled.

:meth:`halfstep.BlockFormat.operand` is the definition, and what other devices and layouts run.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from halfstep.formats import BlockFormat
from halfstep.kernels.library import load_library

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_RULES = {"floor": 0, "rceil": 1, "amax": 2, "two-level": 3}
_GIVEN = 4


@cache
def kernel() -> ctypes.CDLL | str:
    """The compiled kernel's library, or the reason why there is none."""
    found = load_library(("kernels/blocks.cpp",), fused=False)
    if not isinstance(found, str):
        address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        real = ctypes.c_float
        found.halfstep_largest.argtypes = (address, number, *(count,) * 4, address, number)
        found.halfstep_largest.restype = real
        found.halfstep_round_blocks.argtypes = (
            *(address, number, address, number, address, *(count,) * 4, number, number, real),
            *(number, real, real, real, real, number, ctypes.c_uint32, number),
        )
        found.halfstep_round_blocks.restype = None
    return found


def operand(
    form: BlockFormat,
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    *,
    key: int | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """What :meth:`BlockFormat.operand` returns, bit for bit, or None where the kernel cannot run.

    Args:
        form: The format.
        x: (rows, columns) on a CPU, fp32 or bf16, which ``form.check`` has passed.
        dim: -1 or -2, along which blocks lie.
        dtype: Of the values: fp32 or bf16.
        key: Of the random bits of stochastic rounding, ``random_key(seed, step, stream)``; None
            rounds to nearest.
        amax: As there.
    """
    library = kernel()
    known = x.dtype in _KINDS and dtype in _KINDS and x.device.type == "cpu" and x.numel() > 0
    if isinstance(library, str) or not known:
        return None
    if key is None and not x.is_contiguous() and x.t().is_contiguous():
        found = operand(form, x.t(), -3 - dim, dtype, amax=amax)
        assert found is not None, "the kernel has no other conditions"
        values, left = found
        return values.t(), left.t() if left is not None and left.ndim == 2 else left
    x = x.contiguous()
    rows, columns = x.shape
    high, wide = form.block or (1, columns)
    if dim == -2 and form.block is not None:
        high, wide = wide, high
    kind, threads = _KINDS[x.dtype], torch.get_num_threads()
    outer, rest = torch.ones(()), None
    if form.has_tensor_scale:
        finite = ctypes.c_int32()
        shape = (rows, columns, high, wide)
        largest = library.halfstep_largest(
            x.data_ptr(), kind, *shape, ctypes.byref(finite), threads
        )
        by = torch.tensor(largest) if amax is None else amax.float()
        outer, rest = form.of_tensor(by)
        if form.block is None and not finite.value:
            outer = rest = torch.full((), torch.nan)
    values = torch.empty(rows, columns, dtype=dtype)
    left = None
    if form.rule == "amax" and form.block is not None:
        left = torch.empty(rows // high, columns // wide)
    element = form.element
    library.halfstep_round_blocks(
        *(x.data_ptr(), kind, values.data_ptr(), _KINDS[dtype]),
        *(None if left is None else left.data_ptr(), rows, columns, high, wide),
        *(element.mantissa_bits, 127 + element.min_exponent, element.max),
        _GIVEN if form.block is None else _RULES[form.rule],
        *(outer.item(), 1.0 if rest is None else rest.item(), outer.item(), 1.0),
        *(key is not None, key or 0, threads),
    )
    return values, rest if form.has_tensor_scale else left
