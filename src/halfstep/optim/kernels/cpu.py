"""Calls the compiled CPU kernel of an optimizer step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.errors import PrecisionError
from halfstep.kernels.library import address, load_library
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.moments import BLOCK, DTYPES
from halfstep.optim.state import Batch, StepTask, is_dense
from halfstep.precision.masters.rounding import ROUNDING

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_UPDATES = {name: number for number, name in enumerate(ROUNDING)}
_MOMENTS = {"fp32": 0, "bf16": 1, "8bit": 2}
RULES = {"adamw": 0, "sgd": 1, "lion": 2, "directed": 3}
"""The rules that the C++ and Triton kernels implement; others run as torch operations."""


class _Task(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("moment", ctypes.c_void_p * 2),
        ("top", ctypes.c_void_p * 2),
        ("count", ctypes.c_int64),
        ("stream", ctypes.c_uint32),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("rule", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("gradient_dtype", ctypes.c_int32),
        ("update", ctypes.c_int32),
        ("moments", ctypes.c_int32),
        ("moment_count", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("multiplier", ctypes.c_float),
        ("constant", ctypes.c_float * 8),
    )


_SIGNATURES = {
    "halfstep_square_sum": (
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int64,
        ctypes.c_int32,
    ),
    "halfstep_step": (
        ctypes.POINTER(_Task),
        ctypes.c_int64,
        ctypes.POINTER(_Plan),
        ctypes.c_int32,
    ),
}


class NativeKernel:
    """The compiled library of CPU kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._square_sum, self._step = library.halfstep_square_sum, library.halfstep_step
        self._square_sum.restype = ctypes.c_double

    def run(self, batch: Batch, plan: Plan) -> None:
        """Take a step on tasks that are on the CPU and share their dtypes."""
        weight, gradient = batch.tasks[0].weight.dtype, batch.tasks[0].gradient.dtype
        if type(batch.native) is not tuple:
            every = [_addresses(task, weight, plan) for task in batch.tasks]
            table = (_Task * len(every))(*every)
            batch.native = table, [*table]
        table, entries = batch.native
        for task, entry in zip(batch.tasks, entries, strict=True):
            row = task.gradient
            # a gradient is new in every step: the usual one is checked here, without a call
            if (
                row.dtype is gradient
                and row.is_contiguous()
                and row.numel() == entry.count
                and row.is_cpu
                and (begins := row.data_ptr())
            ):
                entry.gradient = begins
            else:
                entry.gradient = address(_row(row), entry.count, gradient)
        shared = _Plan(
            RULES[plan.algorithm.name],
            _number(weight),
            _number(gradient),
            _UPDATES[plan.update],
            _MOMENTS[plan.moments],
            len(batch.tasks[0].moments),
            plan.seed & 0xFFFFFFFF,
            plan.step & 0xFFFFFFFF,
            plan.multiplier,
            (ctypes.c_float * 8)(*plan.constants),
        )
        self._step(table, len(entries), ctypes.byref(shared), torch.get_num_threads())
        increment_version(batch.written)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients, which are dense and on the CPU, in one pass."""
        values = [gradient.contiguous() for gradient in gradients]
        begins = [v.data_ptr() for v in values]
        for v, begin in zip(values, begins, strict=True):  # no call for what is right
            if not v.is_cpu or v.dtype not in _DTYPES or not begin:
                address(v, v.numel(), *_DTYPES)
        count = len(values)
        total = self._square_sum(
            (ctypes.c_void_p * count)(*begins),
            (ctypes.c_int64 * count)(*[v.numel() for v in values]),
            (ctypes.c_int32 * count)(*[_DTYPES[v.dtype] for v in values]),
            count,
            torch.get_num_threads(),
        )
        length = math.sqrt(total) if total >= 0 else math.nan
        return torch.tensor(length, dtype=torch.float32)


def _number(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise PrecisionError(f"the kernel takes fp32, bf16 and fp16 numbers, got {dtype}")
    return _DTYPES[dtype]


def _row(gradient: Tensor) -> Tensor:
    """A gradient as a row, in whichever order of dims it fills its memory, as its weight does."""
    return gradient.as_strided((gradient.numel(),), (1,)) if is_dense(gradient) else gradient


def _addresses(task: StepTask, weight: torch.dtype, plan: Plan) -> _Task:
    """A task for the compiled kernel, without its gradient, which each step has anew."""
    n, moments = task.weight.numel(), plan.algorithm.moments
    if len(task.moments) != len(moments):
        raise PrecisionError(
            f"{plan.algorithm.name} has {len(moments)} moments, the task {len(task.moments)}"
        )
    narrow = weight == torch.bfloat16
    rest = ROUNDING[plan.update].remainder_dtype if narrow else None
    if rest is not None and task.remainder is None:
        raise PrecisionError(f"the kernel takes remainders for update={plan.update!r}, got none")
    entry = _Task(
        weight=address(task.weight, n, torch.bfloat16 if narrow else torch.float32),
        remainder=None if rest is None else address(task.remainder, n, rest),
        count=n,
        stream=2 * task.stream & 0xFFFFFFFF,
    )
    stored, blocks = DTYPES[plan.moments], -(-n // BLOCK) if plan.moments == "8bit" else 0
    for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
        entry.moment[i] = address(codes, n, stored)
        entry.top[i] = address(tops, blocks, torch.uint8)
    return entry


@cache
def native_kernel() -> NativeKernel | str:
    """The compiled kernel, or the reason why there is none."""
    # the steps' bits are those of torch operations, which round a product before they add
    found = load_library(("optim/kernels/cpu.cpp",), _SIGNATURES, fused=False)
    return found if isinstance(found, str) else NativeKernel(found)
