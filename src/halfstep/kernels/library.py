"""Compiles C++ sources into libraries that ctypes loads, and checks what their kernels are given.

The system's C++ compiler builds a library once per machine and source, in a few seconds; it is kept
in the user's cache folder. Loading a library runs its code, so only this user's own file is loaded,
from a folder that nobody else can write, with the SHA-256 that it had when it was built; any other
is built anew. The sources include neither torch's nor Python's headers. They use the OpenMP library
that torch has loaded, so both share one thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def load_library(
    sources: Sequence[str], signatures: Mapping[str, Sequence[type]], *, fused: bool
) -> ctypes.CDLL | str:
    """The library of some sources, or the reason why there is none.

    ``sources`` are paths inside the package, ``.cpp`` files and the headers they include;
    ``signatures`` the argument types of each function, which returns nothing; ``fused`` lets the
    compiler round a product and a sum once instead of twice. The environment's ``CXX`` and
    ``CXXFLAGS`` are heeded; ``HALFSTEP_KERNEL=torch`` asks for torch's operations instead.
    """
    if os.environ.get("HALFSTEP_KERNEL") == "torch":
        return "HALFSTEP_KERNEL=torch"
    known = (name for name in ("g++", "c++", "clang++") if shutil.which(name))
    compiler = shlex.split(os.environ.get("CXX", "")) or [*known][:1]
    if not compiler:
        return "no C++ compiler (g++, c++ or clang++) on the PATH"
    compiler += shlex.split(os.environ.get("CXXFLAGS", ""))
    package = resources.files("halfstep")
    texts = {Path(name).name: package.joinpath(name).read_bytes() for name in sources}
    fixed = (*_FLAGS, f"-ffp-contract={'fast' if fused else 'off'}")
    said = "\0".join((_identity(compiler), _cpu(), " ".join((*fixed, *_WIDE, *_THREADS))))
    digest = hashlib.sha256(b"\0".join((*texts.values(), said.encode()))).hexdigest()[:16]
    try:
        kept = _own_folder() / f"{Path(sources[0]).stem}-{digest}.so"
    except (OSError, RuntimeError) as error:
        return str(error)
    try:
        return _kept(kept, signatures) or _built([*compiler, *fixed], texts, kept, signatures)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        said = (getattr(error, "stderr", None) or "").strip() or str(error)
        return f"{' '.join(compiler)} failed: {said.splitlines()[0]}"


def _own_folder() -> Path:
    """The cache folder, made for this user alone."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "halfstep" / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise OSError(
                f"{path} is a link or another user's, and what it holds would run: remove it, or "
                "set XDG_CACHE_HOME to a folder of yours"
            )
        if facts.st_mode & _OTHERS_WRITE:  # an older umask; what is inside is checked file by file
            path.chmod(0o700)
    return folder


def _kept(path: Path, signatures: Mapping[str, Sequence[type]]) -> ctypes.CDLL | None:
    """The library that the cache folder has, if it is this user's and as it was built."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            facts = os.fstat(file.fileno())
            own = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
            if not own or facts.st_mode & _OTHERS_WRITE:
                return None
            right = hashlib.file_digest(file, "sha256").hexdigest() == _hash_of(path).read_text()
        return _opened(path, signatures) if right else None
    except (OSError, ValueError, AttributeError):  # absent, a link; no library, or another
        return None


def _built(
    compiler: Sequence[str],
    texts: Mapping[str, bytes],
    kept: Path,
    signatures: Mapping[str, Sequence[type]],
) -> ctypes.CDLL:
    """The library, compiled, loaded, and then put into the cache folder."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as work:
        for name, text in texts.items():
            (Path(work) / name).write_bytes(text)
        files = [str(Path(work) / name) for name in texts if name.endswith(".cpp")]
        target = Path(work, kept.name)
        for optional in ((*_WIDE, *_THREADS), _THREADS, _WIDE, ()):
            command = [*compiler, *optional, "-o", str(target), *files]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode == 0:
                break
        done.check_returncode()
        found = _opened(target, signatures)
        with target.open("rb") as file:
            os.fsync(file.fileno())
            _hash_of(target).write_text(hashlib.file_digest(file, "sha256").hexdigest())
        target.chmod(0o600)
        _hash_of(target).chmod(0o600)
        # of two builds at once, one's hash may meet the other's library: the next process builds
        os.replace(_hash_of(target), _hash_of(kept))
        os.replace(target, kept)
    return found


def _hash_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _opened(path: Path, signatures: Mapping[str, Sequence[type]]) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, arguments in signatures.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


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
    return load_library(_SOURCES, _SIGNATURES, fused=True)


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
