"""The host side of the CUDA kernels: address tables, the assignment of programs, launches.

The kernels find every tensor of a step through one table of addresses, so a step is one launch
whatever the number of tensors. The table stays on the device and is copied again, asynchronously
from pinned memory, only after a tensor has moved. Gradients, which move in every step, between a
few places, have a table of their own.

**Source:** many tensors in one launch through a table: ``multi_tensor_apply`` of NVIDIA Apex.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.errors import PrecisionError
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.moments import BLOCK
from halfstep.optim.state import Batch, StepTask
from halfstep.precision.masters.rounding import Update

ROWS = 8
"""Blocks of 128 elements in a tile of the update: 4 elements of a thread, in 80 registers."""
TILES = 8
"""Tiles of a program of the update, which reads addresses once for these 8,192 elements."""
_UPDATED = TILES * ROWS * BLOCK  # elements of a program of the update
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_KEPT = 64  # tables kept, so that gradients alternating between a few addresses need no new copy


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


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _copied(host: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=_KEPT)
def _table(device: torch.device, content: tuple[int, ...]) -> Tensor:
    """A table of this content, as int64 on the device; each content is copied there once."""
    return _copied(torch.tensor(content, dtype=torch.int64), device)


def _addresses(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, bool]:
    """The addresses of tensors, on the device, and whether they are multiples of 16."""
    found = tuple([tensor.data_ptr() for tensor in tensors])
    return _table(device, found), not any([address & 15 for address in found])


@lru_cache(maxsize=32)
def _owners(device: torch.device, counts: tuple[int, ...]) -> Tensor:
    """The tensor of each program, and its number among this tensor's."""
    programs = [-(-count // _UPDATED) for count in counts]
    tensors = torch.arange(len(counts)).repeat_interleave(torch.tensor(programs))
    within = torch.cat([torch.arange(number) for number in programs])
    return _copied(torch.stack([tensors, within], 1).to(torch.int32), device)


def _launch(
    kernel: str, batch: Batch, values: Sequence[Tensor], *arguments: object, **constants: object
) -> None:
    """Launch a kernel over the tiles of a batch, with a value for each element of its weights."""
    if not isinstance(batch.native, _Rows):
        batch.native = _rows(batch.tasks)
    kernels, rows = triton_kernels(), batch.native
    assert isinstance(kernels, ModuleType)
    device = rows.table.device
    table, aligned = _addresses(values, device)
    constants |= {"aligned": aligned and rows.aligned, "rows": ROWS, "tiles": TILES}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if len(rows.owners):
            getattr(kernels, kernel)[(len(rows.owners),)](
                rows.owners, rows.table, table, *arguments, **constants, **kernels.LAUNCH
            )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The table of a batch's tasks, without their gradients, and what each program works on."""

    table: Tensor
    owners: Tensor
    aligned: bool  # whether all addresses but those of block tops are multiples of 16


def _rows(tasks: Sequence[StepTask]) -> _Rows:
    content: list[int] = []
    aligned, device = True, tasks[0].weight.device
    for task in tasks:
        remainder = 0 if task.remainder is None else task.remainder.data_ptr()
        moments = [codes.data_ptr() for codes in task.moments] or [0]
        tops = [top.data_ptr() for top in task.tops] or [0]
        addresses = [task.weight.data_ptr(), remainder, moments[0], moments[-1]]
        aligned = aligned and not any(address % 16 for address in addresses)
        content += [*addresses, tops[0], tops[-1], task.weight.numel(), task.stream]
    counts = tuple(task.weight.numel() for task in tasks)
    return _Rows(_table(device, tuple(content)), _owners(device, counts), aligned)


def run_cuda(batch: Batch, plan: Plan) -> None:
    """Take a step in one launch; bit-identical to ``reference.run_torch``."""
    first = batch.tasks[0]
    if is_capturing(first.weight.device):
        raise PrecisionError(
            "optimizer.step() inside a CUDA graph would repeat this step's bias correction and "
            "random bits at every replay; leave it out of the graph"
        )
    numbers = tuple(map(float, (plan.multiplier, *plan.constants)))  # an int would recompile
    _launch(
        "update_kernel",
        batch,
        [task.gradient for task in batch.tasks],
        None if plan.decision is None else plan.decision.numbers,
        (plan.seed + 0x80000000 & 0xFFFFFFFF) - 0x80000000,  # int32, as any seed fits one kernel
        plan.step,
        *(numbers + (0.0,) * (9 - len(numbers))),
        rule=plan.algorithm.name,
        gradient_dtype=_NAMES[first.gradient.dtype],
        update=_stored(first, plan.update),
        moments=plan.moments,
        decided=plan.decision is not None,
    )
    increment_version(batch.written)


def _stored(task: StepTask, update: Update) -> str:
    return "fp32" if task.weight.dtype == torch.float32 else update


def read_masters(batch: Batch, values: Sequence[Tensor], update: Update) -> None:
    """Read as ``reference.read_masters`` does, in one launch."""
    _launch("masters_kernel", batch, values, update=_stored(batch.tasks[0], update))
    increment_version(values)
