"""Calls the compiled CPU kernel of an optimizer step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.kernels.library import load_library
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.storage.state import StepTask
from halfstep.optim.storage.weights import read_master
from halfstep.precision.masters.rounding import ROUNDING, Update

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


class NativeKernel:
    """The compiled library of CPU kernels, with the types of its functions' arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._square_sum = library.halfstep_square_sum
        self._square_sum.restype = ctypes.c_double
        self._square_sum.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_int64),
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int64,
            ctypes.c_int32,
        )
        self._step = library.halfstep_step
        self._step.restype = None
        self._step.argtypes = (
            ctypes.POINTER(_Task),
            ctypes.c_int64,
            ctypes.POINTER(_Plan),
            ctypes.c_int32,
        )

        self._read = library.halfstep_read
        self._read.restype = None
        self._read.argtypes = (
            ctypes.POINTER(_Task),
            ctypes.POINTER(_Plan),
            ctypes.c_void_p,
            ctypes.c_int32,
        )

    def run(self, tasks: Sequence[StepTask], plan: Plan) -> None:
        """Take a step on tasks that are on the CPU and share their dtypes."""
        for task in tasks:
            if task.native is None:
                task.native = _addresses(task)
            task.native.gradient = task.gradient.data_ptr()
        table = (_Task * len(tasks))(*(task.native for task in tasks))
        shared = _Plan(
            RULES[plan.algorithm.name],
            _DTYPES[tasks[0].weight.dtype],
            _DTYPES[tasks[0].gradient.dtype],
            _UPDATES[plan.update],
            _MOMENTS[plan.moments],
            len(tasks[0].moments),
            plan.seed & 0xFFFFFFFF,
            plan.step & 0xFFFFFFFF,
            plan.multiplier,
            (ctypes.c_float * 8)(*plan.constants),
        )
        self._step(table, len(tasks), ctypes.byref(shared), torch.get_num_threads())
        increment_version([tensor for task in tasks for tensor in task.written])

    def read(self, weight: Tensor, remainder: Tensor | None, update: Update) -> Tensor:
        """What :func:`halfstep.optim.storage.weights.read_master` gives, in one pass."""
        if remainder is None:
            return read_master(weight, remainder, update)
        values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        task = _Task(weight.data_ptr(), remainder.data_ptr(), count=weight.numel())
        plan = _Plan(update=_UPDATES[update])
        self._read(
            ctypes.byref(task), ctypes.byref(plan), values.data_ptr(), torch.get_num_threads()
        )
        return values

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients, which are dense and on the CPU, in one pass."""
        values = [gradient.contiguous() for gradient in gradients]
        count = len(values)
        total = self._square_sum(
            (ctypes.c_void_p * count)(*(value.data_ptr() for value in values)),
            (ctypes.c_int64 * count)(*(value.numel() for value in values)),
            (ctypes.c_int32 * count)(*(_DTYPES[value.dtype] for value in values)),
            count,
            torch.get_num_threads(),
        )
        length = math.sqrt(total) if total >= 0 else math.nan
        return torch.tensor(length, dtype=torch.float32)


def _addresses(task: StepTask) -> _Task:
    """A task for the compiled kernel, without its gradient, which each step has anew."""
    entry = _Task(
        weight=task.weight.data_ptr(),
        remainder=0 if task.remainder is None else task.remainder.data_ptr(),
        count=task.weight.numel(),
        stream=2 * task.stream & 0xFFFFFFFF,
    )
    for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
        entry.moment[i] = codes.data_ptr()
        entry.top[i] = tops.data_ptr()
    return entry


@cache
def native_kernel() -> NativeKernel | str:
    """The compiled kernel, or the reason why there is none."""
    # the steps' bits are those of torch operations, which round a product before they add
    found = load_library(("optim/kernels/cpu.cpp",), fused=False)
    return found if isinstance(found, str) else NativeKernel(found)
