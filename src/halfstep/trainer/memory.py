"""What memory a machine has; what is refused before a model or a batch is made on it.

:mod:`halfstep.trainer.estimate` refuses what a training step would not fit into.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from halfstep.diagnostics.memory.table import size_text
from halfstep.errors import ConfigError

_TOKEN_BYTES = 16
"""Bytes of a token and its target, both int64."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


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


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that nobody uses now; without a count of it, all of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return memory_bytes(device) - int(torch.mps.driver_allocated_memory())
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        found *= 1024
    except (OSError, ValueError, StopIteration):
        return memory_bytes(device)
    for limit, used in zip(_LIMITS, _USED, strict=True):
        try:
            texts = [Path(path).read_text(encoding="ascii").strip() for path in (limit, used)]
            found = min(found, int(texts[0]) - int(texts[1]))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return found


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**30 else f"10^{int(number.bit_length() * 0.30103)}"
