"""What this machine is: its devices, memory and packages, and which precision each is good for.

``env.json`` of a run and ``halfstep doctor`` hold it. A device that is only named is looked up.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.precision.policy.devices import (
    cpu_has_bf16,
    cpu_name,
    default_device,
    name_of,
)

_PACKAGES = ("halfstep", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def choose_device(spec: str, local_rank: int = 0) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device.

    ``auto`` and ``cuda`` mean the GPU of the rank, by its number on its machine. Whether the device
    is there, the policy's :func:`halfstep.support` tells.

    Raises:
        ConfigError: For any other spelling.
    """
    if spec == "auto":
        return default_device(local_rank)
    try:
        return torch.device("cuda", local_rank) if spec == "cuda" else torch.device(spec)
    except RuntimeError as error:
        raise ConfigError(f"run.device={spec!r}; allowed: auto, cpu, cuda, cuda:N") from error


def environment(device: torch.device) -> dict[str, Any]:
    """Report versions, processor and GPUs, as JSON values.

    Only the keys below are read: no environment variable and no user name goes into the report.
    """
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    gpus = [
        {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_bytes": p.total_memory}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cpu": {
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "bf16_instructions": cpu_has_bf16(),
        },
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "device": str(device),
        "device_name": name_of(device),
    }


# Memory.


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: of tensors on CUDA, the process's resident size on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # not getrusage: on Linux its ru_maxrss is inherited from the parent
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS gives bytes, Linux KiB


# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4


def keep_freed_memory(sharded: bool = False) -> None:
    """Tell glibc to reuse freed memory; for a process that only trains, never for a library.

    glibc serves every tensor over 32 MiB (and, until it has learned better, over 128 KiB) by
    ``mmap`` and returns it on free, so each operation of each step page-faults its whole output
    again: ``docs/decisions/0004-allocator.md`` holds the measurements. Where weights are sharded,
    every block's are gathered and freed, in pieces that glibc hardly fits into each other's places;
    there all over 1 MiB go back at once.
    """
    kept = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20}
    returned = {_M_MMAP_MAX: 1 << 16, _M_MMAP_THRESHOLD: 1 << 20}
    if platform.libc_ver()[0] == "glibc":
        for key, value in (returned if sharded else kept).items():
            ctypes.CDLL(None).mallopt(key, value)
