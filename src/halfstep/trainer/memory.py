"""Refuses a run that needs more memory than the machine has, before allocating any of it.

Every estimate is a lower bound, so that nothing that fits is refused: activations, the optimizer's
temporaries and the interpreter come on top.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.policy.policy import PrecisionPolicy

_TOKEN_BYTES = 16
"""Bytes of a token and its target, both int64."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class Need:
    """The sizes that determine the memory of a step.

    Attributes:
        parameters: Number of parameters of the whole model, all of them trained.
        rows: Sequences in one batch, over all ranks and micro-batches.
        length: Tokens in a sequence.
        width: Elements in a token's embedding; 0 where it is not known.
    """

    parameters: int
    rows: int = 0
    length: int = 0
    width: int = 0


def require_room(
    need: Need,
    policy: PrecisionPolicy,
    device: torch.device,
    *,
    grad_accum: int = 1,
    layout: Layout = Layout(),  # noqa: B008  (frozen)
    advice: str,
) -> None:
    """Refuse a run that cannot fit into memory, before anything is allocated.

    Args:
        need: The sizes of the model and its batch.
        policy: Precision policy of the run.
        device: Device that the run trains on.
        grad_accum: Micro-batches per batch.
        layout: How ranks share the work.
        advice: The options that make the run smaller, for the message.

    Raises:
        ConfigError: With the bytes that are needed and those that the device has.
    """
    # A rank's weights, masters, gradients and moments; a micro-batch's tokens and embeddings.
    each = sum(bytes_per_parameter(policy).values())
    state = int(need.parameters * each) // (layout.shard * layout.tensor)
    rows = need.rows // (grad_accum * layout.batch_ranks)
    batch = rows * need.length * (_TOKEN_BYTES + 4 * need.width)
    parts = (
        f"{need.parameters:,} parameters with gradients and moments take {_size(state)}, one "
        f"micro-batch {_size(batch)}"
    )
    _refuse_over(memory_bytes(device), state + batch, str(device), parts, advice)
    # Every rank builds the whole model in fp32 on the host before it is placed.
    host = 4 * need.parameters + batch
    made = f"the model is made in fp32 on the host, where it takes {_size(4 * need.parameters)}"
    _refuse_over(memory_bytes(torch.device("cpu")), host, "this machine", made, advice)


def require_rows(rows: int, option: str) -> None:
    """Refuse a batch size for which the machine could not hold even one token per text.

    Raises:
        ConfigError: Naming the option.
    """
    have = memory_bytes(torch.device("cpu"))
    if rows * _TOKEN_BYTES > have:
        raise ConfigError(
            f"{option} {_count(rows)} texts at once need more memory than this machine has "
            f"({_size(have)}); a batch of 8 to 256 is usual"
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


def _refuse_over(have: int, need: int, where: str, parts: str, advice: str) -> None:
    if need > have:
        raise ConfigError(
            f"the run needs at least {_size(need)}, {where} has {_size(have)}: {parts}. Lower "
            f"{advice}"
        )


def _size(size: int) -> str:
    for unit, name in ((10**15, "PB"), (10**12, "TB"), (10**9, "GB")):
        if size >= unit:
            whole = size > 999 * unit
            return f"{_count(size // unit) if whole else f'{size / unit:.3g}'} {name}"
    return f"{size / 10**6:.3g} MB"


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**30 else f"10^{int(number.bit_length() * 0.30103)}"
