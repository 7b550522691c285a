"""Describes this machine and how it runs each precision, for ``env.json`` and ``doctor``."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from importlib import metadata
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.kernels.library import loaded
from halfstep.optim.kernels import kernel_for
from halfstep.precision.casting.autocast import Autocast, support
from halfstep.precision.policy.devices import cpu_has_bf16, cpu_name, default_device, name_of
from halfstep.precision.policy.policy import POLICIES, PrecisionPolicy, dtype_name
from halfstep.precision.policy.spelling import Auto

_PACKAGES = ("halfstep", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def choose_device(spec: str, local_rank: int = 0) -> torch.device:
    """Turn ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N`` into a device.

    Args:
        spec: ``auto`` and ``cuda`` mean the rank's own GPU.
        local_rank: The rank's number on its machine.

    Raises:
        ConfigError: For any other spelling, or a CUDA device that torch does not see.
    """
    if spec == "auto":
        return default_device(local_rank)
    if spec == "cpu":
        return torch.device("cpu")
    kind, _, index = spec.partition(":")
    if spec == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("run.device=mps: torch sees no GPU of a Mac; use --device cpu")
        return torch.device("mps")
    if kind != "cuda" or not (index == "" or index.isdecimal()):
        allowed = "auto, cpu, mps, cuda, cuda:N"
        raise ConfigError(f"run.device={spec!r}; allowed: {allowed}")
    count = torch.cuda.device_count()
    number = int(index) if index else local_rank
    if number >= count:
        raise ConfigError(f"run.device={spec}: torch sees {count} CUDA devices; use --device cpu")
    return torch.device("cuda", number)


def policy_on(precision: PrecisionPolicy | Auto, device: torch.device) -> PrecisionPolicy:
    """Return a configuration's policy on a device, which decides what ``auto`` means."""
    return precision.on(device) if isinstance(precision, Auto) else precision


def environment(device: torch.device) -> dict[str, Any]:
    """Report versions, processor, GPUs and how each policy runs on ``device``, as JSON values.

    Only the keys below are read: no environment variable and no user name goes into the report.
    """
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    gpus = [
        {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_bytes": p.total_memory}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    supports = {name: support(policy, device) for name, policy in POLICIES.items()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cpu": {
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
            "bf16_instructions": cpu_has_bf16(),
        },
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "device": str(device),
        "device_name": name_of(device),
        # without the reason, which may name one of the user's folders
        "optimizer_kernel": kernel_for(device.type).way,
        "forward_kernels": _forward_kernels(device),
        "precisions": {n: {"status": s.status, "reason": s.reason} for n, s in supports.items()},
    }


def _forward_kernels(device: torch.device) -> str:
    """What computes attention, norms and losses in bf16; why torch does, where it does."""
    if device.type != "cpu":
        return "torch"
    found = loaded()
    if not isinstance(found, str):
        return "compiled C++"
    # the compiler's own words may name one of the user's folders
    reason = "the C++ compiler failed" if "failed" in found else found
    return f"torch ({reason})"


def gemm_flops_per_second(
    policy: PrecisionPolicy,
    device: torch.device,
    size: int = 0,
    repeats: int = 5,
    shape: tuple[int, int, int] | None = None,
) -> float:
    """Measure the rate of a matrix product in the compute dtype: the best of a few.

    Args:
        policy: Gives the compute dtype and how the device runs it (simulation included).
        device: A device on which the policy is supported.
        size: Edge of square matrices; 0: 1024 on a CPU, 4096 on CUDA.
        repeats: Timed products, after one that warms up.
        shape: In place of ``size``, m, k and n of a product of (m, k) and (k, n).

    Returns:
        Floating-point operations per second, counting 2 m k n for each product.
    """
    size = size or (4096 if device.type == "cuda" else 1024)
    m, k, n = shape or (size, size, size)
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(*edges, generator=generator).to(device, policy.compute_dtype)
        for edges in ((m, k), (k, n))
    )
    best = float("inf")
    with torch.no_grad(), Autocast(policy, None, device).arithmetic():
        for repeat in range(repeats + 1):
            _wait(device)
            start = time.perf_counter()
            a @ b
            _wait(device)
            seconds = time.perf_counter() - start
            if repeat:
                best = min(best, seconds)
    return float(2 * m * k * n / best)


def gemm_table(
    device: torch.device, shape: tuple[int, int, int] | None = None
) -> list[dict[str, Any]]:
    """List each compute format's status on ``device`` and, unless refused, its measured rate.

    ``shape`` is as in :func:`gemm_flops_per_second`; None: the device's usual size.
    """
    rows = []
    for name in ("fp32", "tf32", "bf16-mixed", "fp16-mixed"):
        policy = POLICIES[name]
        found = support(policy, device)
        row: dict[str, Any] = {
            "format": "tf32" if policy.tf32 else dtype_name(policy.compute_dtype),
            "status": found.status,
        }
        if found.status != "refused":
            row["gemm_flops_per_second"] = gemm_flops_per_second(policy, device, shape=shape)
        rows.append(row)
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# Keep freed memory for the next step instead of giving it back to the kernel.
#
# glibc serves every tensor over 32 MiB (and, until it has learned better, over 128 KiB) by ``mmap``
# and returns it on free, so each operation of each step page-faults its whole output again. For a
# process that does the same allocations thousands of times it pays to keep the memory:
# ``docs/decisions/0004-allocator.md`` holds the measurement.


# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed memory; for a process that only trains, never for a library.

    Returns:
        Whether it was done: False on systems without glibc's ``mallopt``.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    return all([mallopt(key, value) == 1 for key, value in settings])
