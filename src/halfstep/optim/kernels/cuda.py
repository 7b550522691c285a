"""The host side of the CUDA kernels: address tables, the assignment of programs, launches.

The kernels find every tensor of a step through one table of addresses, so a step is one launch
whatever the number of tensors. The table stays on the device and is copied again, asynchronously
from pinned memory, only after a tensor has moved.

**Source:** many tensors in one launch through a table: ``multi_tensor_apply`` of NVIDIA Apex.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import groupby
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from halfstep.errors import PrecisionError
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.moments import BLOCK
from halfstep.optim.state import StepTask, is_dense
from halfstep.precision.masters.stepping import DeviceDecision

ROWS = 16
"""Blocks of 128 elements in a tile of the update: 8 elements, 16 bytes of bf16, per thread."""
TILES = 4
"""Tiles of a program of the update, which reads addresses once for these 8,192 elements."""
STATISTICS_TILE = 2048
STATISTICS_TILES = 16
_UPDATED = TILES * ROWS * BLOCK  # elements of a program of the update
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_KEPT = 32  # tables kept, so that gradients alternating between a few addresses need no new copy


@cache
def triton_kernels() -> ModuleType | str:
    """The module of CUDA kernels, or the reason why there is none.

    ``HALFSTEP_KERNEL=torch`` in the environment asks for the torch operations instead.
    """
    if os.environ.get("HALFSTEP_KERNEL") == "torch":
        return "HALFSTEP_KERNEL=torch"
    if torch.version.hip:
        return "the Triton kernels are verified bit for bit on NVIDIA GPUs only"
    try:
        import halfstep.optim.kernels.triton_kernels as kernels
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return kernels


def can_launch(device: torch.device) -> bool:
    """Whether there are kernels for a device: CUDA, or any under Triton's interpreter."""
    right = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return right and not isinstance(triton_kernels(), str)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=_KEPT)
def _table(device: torch.device, content: tuple[int, ...]) -> Tensor:
    """A table of this content, as int64 on the device; each content is copied there once."""
    host = torch.tensor(content, dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=32)
def _owners(device: torch.device, counts: tuple[int, ...], size: int) -> Tensor:
    """The table row that each program works on: ``ceil(count / size)`` programs per tensor."""
    programs = torch.tensor([_programs(count, size) for count in counts])
    rows = torch.arange(len(counts), dtype=torch.int32)
    owners = rows.repeat_interleave(programs)
    if device.type == "cuda":
        owners = owners.pin_memory()
    return owners.to(device, non_blocking=True)


def _programs(count: int, size: int) -> int:
    return -(-count // size)


def _rows(tasks: Sequence[StepTask], seed: int) -> tuple[list[int], bool]:
    """The table rows of a launch of the update, and whether all addresses are 16-byte aligned."""
    found: list[int] = []
    programs = 0
    aligned = True
    for task in tasks:
        count = task.weight.numel()
        remainder = 0 if task.remainder is None else task.remainder.data_ptr()
        moments = [codes.data_ptr() for codes in task.moments] or [0]
        tops = [top.data_ptr() for top in task.tops] or [0]
        addresses = [task.weight.data_ptr(), remainder, task.gradient.data_ptr()]
        addresses += [moments[0], moments[-1]]
        aligned = aligned and not any(address % 16 for address in addresses)
        found += [*addresses, tops[0], tops[-1], count, task.stream, seed & 0xFFFFFFFF, programs]
        programs += _programs(count, _UPDATED)
    return found, aligned


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run_cuda(tasks: Sequence[StepTask], plan: Plan) -> None:
    """Take a step in one launch per weight dtype; bit-identical to ``reference.run_torch``."""
    kernels = triton_kernels()
    assert isinstance(kernels, ModuleType)
    device = tasks[0].weight.device
    if is_capturing(device):
        raise PrecisionError(
            "optimizer.step() inside a CUDA graph would repeat this step's bias correction and "
            "random bits at every replay; leave it out of the graph"
        )
    numbers = tuple(map(float, (plan.multiplier, *plan.constants)))  # an int would recompile
    decision = None if plan.decision is None else plan.decision.numbers
    with _on(device):
        for dtype in dict.fromkeys(task.weight.dtype for task in tasks):
            found = [task for task in tasks if task.weight.dtype == dtype]
            content, aligned = _rows(found, plan.seed)
            owners = _owners(device, tuple(task.weight.numel() for task in found), _UPDATED)
            if not owners.numel():
                continue
            kernels.update_kernel[(owners.numel(),)](
                _table(device, tuple(content)),
                owners,
                decision,
                plan.step,
                *(numbers + (0.0,) * (9 - len(numbers))),
                rule=plan.algorithm.name,
                gradient_dtype=_NAMES[found[0].gradient.dtype],
                update="fp32" if dtype == torch.float32 else plan.update,
                moments=plan.moments,
                aligned=aligned,
                decided=decision is not None,
                rows=ROWS,
                tiles=TILES,
                **kernels.LAUNCH,
            )
    increment_version([tensor for task in tasks for tensor in task.written])


def decide(
    loss: Tensor, gradients: Mapping[nn.Parameter, Tensor], max_norm: float | None
) -> DeviceDecision | None:
    """Decide on a step from one pass over its gradients; None where no kernel can read them.

    The norm is the root of fp64 sums, which come out the same in every run.
    """
    kernels = triton_kernels()
    assert isinstance(kernels, ModuleType)
    if any(g.dtype not in _NAMES or g.is_sparse for g in gradients.values()):
        return None
    device = next(iter(gradients.values())).device
    order = sorted(gradients, key=lambda p: _NAMES[gradients[p].dtype])
    flags = torch.zeros(len(order), dtype=torch.int32, device=device)
    partials, first = [], 0
    with _on(device):
        for dtype, members in groupby(order, lambda p: gradients[p].dtype):
            values = [gradients[parameter] for parameter in members]
            values = [v if is_dense(v) else v.contiguous() for v in values]
            partials.append(_statistics(kernels, dtype, values, flags[first:]))
            first += len(values)
        norm = torch.cat(partials).sum().sqrt()
        return DeviceDecision(loss, norm, flags, order, max_norm)


def _statistics(
    kernels: ModuleType, dtype: torch.dtype, values: Sequence[Tensor], flags: Tensor
) -> Tensor:
    """The fp64 sums of squares of these gradients, by program, and their ``flags``."""
    size = STATISTICS_TILE * STATISTICS_TILES
    content: list[int] = []
    programs = 0
    for value in values:
        content += [value.data_ptr(), value.numel(), programs]
        programs += _programs(value.numel(), size)
    device = flags.device
    partials = torch.zeros(programs, dtype=torch.float64, device=device)
    if programs:
        kernels.statistics_kernel[(programs,)](
            _table(device, tuple(content)),
            _owners(device, tuple(value.numel() for value in values), size),
            partials,
            flags,
            dtype=_NAMES[dtype],
            aligned=not any(value.data_ptr() % 16 for value in values),
            tile=STATISTICS_TILE,
            tiles=STATISTICS_TILES,
            **kernels.LAUNCH,
        )
    return partials
