"""What memory a machine has and a run takes; what is refused before a model or a batch is made.

:mod:`halfstep.trainer.estimate` refuses what a training step would not fit into.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from halfstep.diagnostics.memory import size_text
from halfstep.errors import ConfigError

_TOKEN_BYTES = 16
"""Bytes of a token and its target, both int64."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def require_host_room(parameters: int, tokens: int, advice: str) -> None:
    """Refuse a model, which every rank makes in fp32 on the host, or a batch beyond its memory.

    Args:
        parameters: Number of parameters of the whole model; 0 where it is not known.
        tokens: Tokens of one micro-batch.
        advice: The options that make the run smaller, for the message.

    Raises:
        ConfigError: With the bytes that are needed and those that the machine has.
    """
    made, batch = 4 * parameters, _TOKEN_BYTES * tokens
    have = memory_bytes(torch.device("cpu"))
    if made + batch > have:
        raise ConfigError(
            f"the run needs at least {size_text(made + batch)}, this machine has "
            f"{size_text(have)}: the model is made in fp32 on the host, where it takes "
            f"{size_text(made)}, and the tokens of one micro-batch take {size_text(batch)}. Lower "
            f"{advice}"
        )


def require_rows(rows: int, option: str) -> None:
    """Refuse a batch size for which the machine could not hold even one token per text.

    Raises:
        ConfigError: Naming the option.
    """
    have = memory_bytes(torch.device("cpu"))
    if rows * _TOKEN_BYTES > have:
        raise ConfigError(
            f"{option} {_count(rows)} texts at once need more memory than this machine has "
            f"({size_text(have)}); a batch of 8 to 256 is usual"
        )


def memory_bytes(device: torch.device) -> int:
    """Return a device's memory; for the CPU, the machine's memory or its cgroup's lower limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            limit = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if limit.isdecimal():
            found = min(found, int(limit))
    return found


# The peak of a run, for its metrics.


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: of tensors on CUDA, the process's resident size on the CPU.

    On Linux that is the peak since :func:`count_peak_from_here`.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # not getrusage: on Linux its ru_maxrss is inherited from the parent process
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS gives bytes, Linux KiB


def count_peak_from_here() -> None:
    """Let the peak of this process begin anew, so that the preparation of data is not in it.

    What the preparation has freed goes back to the system first. On systems other than Linux, and
    where the kernel refuses, the peak stays that of the whole process.

    **Source:** proc_pid_clear_refs(5): 5 resets the peak resident set size to its current value.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**30 else f"10^{int(number.bit_length() * 0.30103)}"
