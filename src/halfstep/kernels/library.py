"""Compiles C++ sources into a library that ctypes loads.

The system's C++ compiler builds a library once per machine and source, in a few seconds; it is kept
in the user's cache folder. The sources include neither torch's nor Python's headers. They use the
OpenMP library that torch has loaded, so both share one thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from halfstep.errors import PrecisionError

_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
# On x86, compilers use half of AVX-512's width unless told.
_WIDE = ("-mprefer-vector-width=512",)
# OpenMP is not installed everywhere: "defs" refuses a library that would lack its functions.
_THREADS = ("-fopenmp", "-Wl,-z,defs")


def load_library(sources: Sequence[str], *, fused: bool) -> ctypes.CDLL | str:
    """The library of some sources, or the reason why there is none.

    ``HALFSTEP_KERNEL=torch`` in the environment asks for torch's operations instead.

    Args:
        sources: Paths inside the package: ``.cpp`` files to compile, and the headers they include.
        fused: Whether the compiler may round a product and a sum once instead of twice.
    """
    if os.environ.get("HALFSTEP_KERNEL") == "torch":
        return "HALFSTEP_KERNEL=torch"
    known = (name for name in ("g++", "c++", "clang++") if shutil.which(name))
    compiler = shlex.split(os.environ.get("CXX", "")) or [*known][:1]
    if not compiler:
        return "no C++ compiler (g++, c++ or clang++) on the PATH"
    try:
        return ctypes.CDLL(str(_build(compiler, sources, fused)))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        said = (getattr(error, "stderr", None) or "").strip() or str(error)
        return f"{' '.join(compiler)} failed: {said.splitlines()[0]}"


def _build(compiler: Sequence[str], sources: Sequence[str], fused: bool) -> Path:
    """The path of the library, which is compiled unless the cache folder has it."""
    package = resources.files("halfstep")
    texts = {Path(name).name: package.joinpath(name).read_bytes() for name in sources}
    fixed = (*_FLAGS, f"-ffp-contract={'fast' if fused else 'off'}")
    parts = (*texts.values(), _identity(compiler).encode(), _cpu().encode())
    parts = (*parts, " ".join((*fixed, *_WIDE, *_THREADS)).encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "halfstep" / "kernels"
    library = folder / f"{Path(sources[0]).stem}-{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:  # renamed once complete
        for name, text in texts.items():
            (Path(work) / name).write_bytes(text)
        files = [str(Path(work) / name) for name in texts if name.endswith(".cpp")]
        target = Path(work) / "library.so"
        for optional in ((*_WIDE, *_THREADS), _THREADS, _WIDE, ()):
            flags = (*fixed, *optional)
            command = [*compiler, *flags, "-o", str(target), *files]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode == 0:
                os.replace(target, library)
                return library
        done.check_returncode()
    raise AssertionError("unreachable: check_returncode raises")


def _identity(compiler: Sequence[str]) -> str:
    """Which compiler it is, by its files, as asking it for its version would take 10 ms."""
    files = [Path(found).resolve() for found in map(shutil.which, compiler) if found]
    return " ".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


def _cpu() -> str:
    """The CPU's identity, on which -march=native depends: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    wanted = ("model name", "flags", "features", "cpu part")
    return "".join(sorted({line for line in lines if line.lower().startswith(wanted)}))


def address(x: Tensor | None, count: int, *dtypes: torch.dtype) -> int | None:
    """Check that a tensor is what a kernel is about to read or write; return where it begins.

    A kernel sees an address alone and would believe anything that it is told of it, so it gets one
    from here or from :func:`strided_address` only. None is the null pointer.

    Args:
        x: The tensor.
        count: The numbers that the kernel takes, side by side.
        dtypes: Those that the kernel knows.

    Raises:
        PrecisionError: The tensor has another dtype, size, layout or device.
    """
    if x is None:
        return None
    if x.dtype in dtypes and x.numel() == count and x.device.type == "cpu" and x.is_contiguous():
        return x.data_ptr()
    raise _refused(x, f"{count} adjacent numbers", *dtypes)


def strided_address(
    x: Tensor, shape: Sequence[int], dtype: torch.dtype, *, rows: bool = True
) -> int:
    """Like :func:`address`, for a kernel that is told the tensor's strides too.

    With ``rows``, numbers along the last dim must be adjacent.
    """
    adjacent = not rows or x.stride(-1) == 1 or x.shape[-1] <= 1
    if x.dtype == dtype and x.shape == tuple(shape) and x.device.type == "cpu" and adjacent:
        return x.data_ptr()
    raise _refused(x, f"shape {tuple(shape)}" + ", adjacent along the last dim" * rows, dtype)


def _refused(x: Tensor, wanted: str, *dtypes: torch.dtype) -> PrecisionError:
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return PrecisionError(
        f"the kernel takes {wanted} in {allowed} on a CPU, got a tensor of shape "
        f"{tuple(x.shape)} and strides {x.stride()} in {x.dtype} on {x.device}"
    )
