"""Builds, loads and calls the compiled CPU kernel.

The system's C++ compiler builds it once per machine and source, in about a second; it is kept in
the user's cache folder and called through ctypes, without torch's or Python's headers. It uses the
OpenMP library that torch has loaded, so both share one thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from halfstep.optim.kernels.reference import Plan
from halfstep.optim.storage.state import StepTask, mark_written
from halfstep.precision.masters.rounding import ROUNDING

_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
# On x86, compilers use half of AVX-512's width unless told. OpenMP is not installed everywhere.
_OPTIONAL = ("-mprefer-vector-width=512", "-fopenmp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_UPDATES = {name: number for number, name in enumerate(ROUNDING)}
_MOMENTS = {"fp32": 0, "bf16": 1, "8bit": 2}
RULES = {"adamw": 0, "sgd": 1, "lion": 2}
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

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
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

    def run(self, tasks: Sequence[StepTask], plan: Plan) -> None:
        """Take a step on tasks that are on the CPU and share their dtypes."""
        table = (_Task * len(tasks))()
        for entry, task in zip(table, tasks, strict=True):
            entry.weight = task.weight.data_ptr()
            entry.remainder = 0 if task.remainder is None else task.remainder.data_ptr()
            entry.gradient = task.gradient.data_ptr()
            for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
                entry.moment[i] = codes.data_ptr()
                entry.top[i] = tops.data_ptr()
            entry.count = task.weight.numel()
            entry.stream = 2 * task.stream & 0xFFFFFFFF
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
        mark_written(tasks)

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


@cache
def native_kernel() -> NativeKernel | str:
    """The compiled kernel, or the reason why there is none.

    ``HALFSTEP_KERNEL=torch`` in the environment asks for the torch operations instead.
    """
    if os.environ.get("HALFSTEP_KERNEL") == "torch":
        return "HALFSTEP_KERNEL=torch"
    known = (name for name in ("g++", "c++", "clang++") if shutil.which(name))
    compiler = shlex.split(os.environ.get("CXX", "")) or [*known][:1]
    if not compiler:
        return "no C++ compiler (g++, c++ or clang++) on the PATH"
    try:
        return NativeKernel(_build(compiler))
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError) as error:
        said = (getattr(error, "stderr", None) or "").strip() or str(error)
        return f"{' '.join(compiler)} failed: {said.splitlines()[0]}"


def _build(compiler: Sequence[str]) -> Path:
    """The path of the library, which is compiled unless the cache folder has it."""
    source = resources.files("halfstep").joinpath("optim/kernels/cpu.cpp").read_bytes()
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    parts = (source, version.encode(), _cpu().encode(), " ".join((*_FLAGS, *_OPTIONAL)).encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "halfstep" / "kernels"
    library = folder / f"step-{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:  # renamed once complete
        file = Path(work) / "native.cpp"
        file.write_bytes(source)
        target = Path(work) / "step.so"
        for flags in ((*_FLAGS, *_OPTIONAL), (*_FLAGS, _OPTIONAL[1]), _FLAGS):
            command = [*compiler, *flags, "-o", str(target), str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode == 0:
                os.replace(target, library)
                return library
        done.check_returncode()
    raise AssertionError("unreachable: check_returncode raises")


def _cpu() -> str:
    """The CPU's identity, on which -march=native depends: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    wanted = ("model name", "flags", "features", "cpu part")
    return "".join(sorted({line for line in lines if line.lower().startswith(wanted)}))
