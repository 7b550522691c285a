"""Compiles C++ sources into libraries that ctypes loads, and checks what their kernels are given.

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
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

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

    ``sources`` are paths inside the package, ``.cpp`` files and the headers they include; ``fused``
    lets the compiler round a product and a sum once instead of twice. The environment's ``CXX`` and
    ``CXXFLAGS`` are heeded; ``HALFSTEP_KERNEL=torch`` asks for torch's operations instead.
    """
    if os.environ.get("HALFSTEP_KERNEL") == "torch":
        return "HALFSTEP_KERNEL=torch"
    known = (name for name in ("g++", "c++", "clang++") if shutil.which(name))
    compiler = shlex.split(os.environ.get("CXX", "")) or [*known][:1]
    if not compiler:
        return "no C++ compiler (g++, c++ or clang++) on the PATH"
    compiler += shlex.split(os.environ.get("CXXFLAGS", ""))
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
    said = "\0".join((_identity(compiler), _cpu(), " ".join((*fixed, *_WIDE, *_THREADS))))
    digest = hashlib.sha256(b"\0".join((*texts.values(), said.encode()))).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "halfstep", "kernels")
    library = folder / f"{Path(sources[0]).stem}-{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:  # renamed once complete
        for name, text in texts.items():
            (Path(work) / name).write_bytes(text)
        files = [str(Path(work) / name) for name in texts if name.endswith(".cpp")]
        target = Path(work, "library.so")
        for optional in ((*_WIDE, *_THREADS), _THREADS, _WIDE, ()):
            command = [*compiler, *fixed, *optional, "-o", str(target), *files]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode == 0:
                os.replace(target, library)
                return library
        done.check_returncode()
    raise AssertionError("unreachable: check_returncode raises")


def _identity(compiler: Sequence[str]) -> str:
    """Its words, and its files, as asking it for its version would take 10 ms."""
    files = [Path(found).resolve() for found in map(shutil.which, compiler) if found]
    said = (f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return " ".join((*compiler, *said))


def _cpu() -> str:
    """The CPU's identity, on which -march=native depends: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    said = ("model name", "flags", "features", "cpu part")
    return "".join(sorted({line for line in lines if line.lower().startswith(said)}))


def address(x: Tensor | None, count: int, *dtypes: torch.dtype) -> int | None:
    """Check that a tensor is what a kernel is about to read or write; return where it begins.

    A kernel sees an address alone and would believe anything that it is told of it, so it gets one
    from here or from :func:`strided_address` only: of ``count`` numbers side by side on a CPU, in
    one of ``dtypes``. None is the null pointer.
    """
    if x is None:
        return None
    row = x.numel() == count and x.is_contiguous()
    # an address is null where the memory was given back
    if row and x.dtype in dtypes and x.device.type == "cpu" and (x.data_ptr() or not count):
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


# The library of kernels for forward and backward passes.

_SOURCES = ("kernels/attention.cpp", "kernels/rows.cpp", "kernels/vectors.h")
Address = ctypes.c_void_p
_COUNT, _INT, _FLOAT = ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "halfstep_attention": (Address, _INT),
    "halfstep_attention_backward": (Address, _INT),
    "halfstep_gelu_tanh": (Address, Address, Address, _COUNT, _INT),
    "halfstep_gelu_tanh_rows": (
        *(Address, Address, Address, Address, Address, _COUNT, _COUNT, _INT),
    ),
    "halfstep_dropout": (*(Address, _INT, Address, _FLOAT, _FLOAT, ctypes.c_uint64, _COUNT, _INT),),
    "halfstep_norm": (
        *(Address, _INT, Address, Address, Address, Address, Address, _FLOAT),
        *(Address, _INT, Address, Address, _COUNT, _COUNT, _INT),
    ),
    "halfstep_norm_backward": (
        *(Address, _INT, Address, Address, _INT, Address, Address, Address, Address, Address),
        *(_COUNT, _COUNT, _INT),
    ),
    "halfstep_cross_entropy": (
        *(Address, _INT, _COUNT, Address, _COUNT, Address, Address, _COUNT, _COUNT, _INT),
    ),
    "halfstep_cross_entropy_backward": (
        *(Address, _INT, _COUNT, Address, Address, Address, Address, _COUNT),
        *(_COUNT, _COUNT, _INT),
    ),
}


@cache
def loaded() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    found = load_library(_SOURCES, fused=True)
    if not isinstance(found, str):
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
    return found


def library() -> Any:
    """The library, where :func:`loaded` is known to have found it."""
    found = loaded()
    if isinstance(found, str):
        raise RuntimeError(f"no compiled kernels: {found}")
    return found


def drawn_seed() -> int:
    """A seed for a kernel that draws, from torch's global generator of the CPU."""
    return int(torch.randint(2**62, (), device="cpu"))


def new(*shape: int) -> Tensor:
    """Memory for fp32 numbers, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def by_torch(grad: Tensor) -> bool:
    """Whether torch's operations make a backward: one to be differentiated, or under ``vmap``."""
    if torch.is_grad_enabled():
        return True
    try:
        grad.data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor of vmap has no memory of its own
        return True
    return False


@torch.enable_grad()
def differentiated(
    function: Callable[..., Tensor], given: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """A function's gradients, to be differentiated again; None where none is wanted."""
    wanted = [t for t in given if t is not None and t.requires_grad]
    made = iter(torch.autograd.grad(function(*given), wanted, grad, create_graph=True))
    return tuple(next(made) if t is not None and t.requires_grad else None for t in given)
