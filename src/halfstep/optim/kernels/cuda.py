"""The host side of the CUDA kernels: address tables, the assignment of programs, launches.

The kernels find every tensor of a step through one table of addresses, so a step is one launch
whatever the number of tensors. The table stays on the device and is copied again, asynchronously
from pinned memory, only after a tensor has moved.

**Source:** many tensors in one launch through a table: ``multi_tensor_apply`` of NVIDIA Apex.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.errors import PrecisionError
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.storage.moments import BLOCK
from halfstep.optim.storage.state import StepTask

ROWS = 16
"""Blocks of 128 elements in a tile of the update: 8 elements, 16 bytes of bf16, per thread."""
TILES = 4
"""Tiles of a program of the update, which reads addresses once for these 8,192 elements."""
STATISTICS_TILE = 2048
STATISTICS_TILES = 16
_UPDATED = TILES * ROWS * BLOCK  # elements of a program of the update
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_KEPT = 8  # tables kept, so that gradients alternating between a few addresses need no new copy


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
        import halfstep.optim.kernels.triton_decide as kernels
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return kernels


def can_launch(device: torch.device) -> bool:
    """Whether the kernels run on a device: CUDA, or any under Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Tables:
    """The address tables on one device, each content copied there once.

    A copy captured into a CUDA graph reads host memory at every replay, and pinned memory cannot be
    allocated during a capture: so a spare pair is kept ready, and captured pairs are never freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._spare: tuple[Tensor, Tensor] | None = None
        self._captured: list[tuple[Tensor, Tensor]] = []

    def get(self, content: tuple[int, ...]) -> Tensor:
        """A table of this content, as int64 on the device.

        Raises:
            PrecisionError: During a capture that was not preceded by a step of as many tensors.
        """
        capturing = is_capturing(self.device)
        pair = self._held.pop(content, None)
        if pair is None:
            pair = self._spare if capturing else self._pair(len(content))
            if pair is None or pair[0].numel() != len(content):
                raise PrecisionError(
                    "this step was captured into a CUDA graph before it ran once; take one step "
                    "with the same parameters before the capture, as torch.cuda.graph asks for"
                )
            self._spare = None if capturing else self._pair(len(content))
            pair[0].copy_(torch.tensor(content, dtype=torch.int64))
            pair[1].copy_(pair[0], non_blocking=True)
        self._held[content] = pair  # the latest is last
        if len(self._held) > _KEPT:
            del self._held[next(iter(self._held))]
        if capturing:
            self._captured.append(pair)
        return pair[1]

    def _pair(self, count: int) -> tuple[Tensor, Tensor]:
        host = torch.empty(count, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host, torch.empty(count, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, over tensors that share dtypes, formats, options and step number."""

    rule: str  # the name of the update rule
    update: str  # ``"fp32"`` for fp32 weights, else the rounding mode of bf16 weights
    gradient: str  # the gradients' dtype, by its short name
    moments: str  # the moments' format
    updates: Tensor  # int32: the table row that each program of the update works on
    statistics: Tensor  # int32: the same for the programs of the gradient statistics


def make_launch(tasks: Sequence[StepTask], plan: Plan, first_row: int) -> Launch:
    """The launch for tasks whose rows begin at ``first_row`` of the table."""
    weight, gradient = tasks[0].weight, tasks[0].gradient
    counts = tuple(task.weight.numel() for task in tasks)
    return Launch(
        rule=plan.algorithm.name,
        update="fp32" if weight.dtype == torch.float32 else plan.update,
        gradient=_NAMES[gradient.dtype],
        moments=plan.moments,
        updates=_owners(weight.device, counts, _UPDATED, first_row),
        statistics=_owners(weight.device, counts, STATISTICS_TILE * STATISTICS_TILES, first_row),
    )


@lru_cache(maxsize=32)
def _owners(device: torch.device, counts: tuple[int, ...], size: int, first: int) -> Tensor:
    """The table row that each program works on: ``ceil(count / size)`` programs per tensor."""
    programs = torch.tensor([_programs(count, size) for count in counts])
    rows = torch.arange(first, first + len(counts), dtype=torch.int32)
    owners = rows.repeat_interleave(programs)
    if device.type == "cuda":
        owners = owners.pin_memory()
    return owners.to(device, non_blocking=True)


def _programs(count: int, size: int) -> int:
    return -(-count // size)


def rows(tasks: Sequence[StepTask], seed: int) -> tuple[list[int], bool]:
    """The table rows of one launch, and whether all addresses are 16-byte aligned."""
    found: list[int] = []
    update = statistics = 0
    aligned = True
    for task in tasks:
        count = task.weight.numel()
        remainder = 0 if task.remainder is None else task.remainder.data_ptr()
        moments = [codes.data_ptr() for codes in task.moments] or [0]
        tops = [top.data_ptr() for top in task.tops] or [0]
        addresses = [task.weight.data_ptr(), remainder, task.gradient.data_ptr()]
        addresses += [moments[0], moments[-1]]
        aligned = aligned and not any(address % 16 for address in addresses)
        found += [*addresses, tops[0], tops[-1], count, task.stream, seed & 0xFFFFFFFF]
        found += [update, statistics]
        update += _programs(count, _UPDATED)
        statistics += _programs(count, STATISTICS_TILE * STATISTICS_TILES)
    return found, aligned


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch_update(
    kernels: ModuleType,
    launch: Launch,
    table: Tensor,
    *,
    aligned: bool,
    numbers: tuple[float, ...] = (),
    step: int = 0,
    state: Tensor | None = None,
    at_row: int = 0,
) -> None:
    """Update the tensors of a launch, by a table and its alignment as :func:`rows` gives them.

    ``numbers`` are the multiplier and the rule's constants. Without them the kernel reads these
    from the buffer ``state`` (on_device/buffer.py), where the launch's row begins at ``at_row``.
    """
    if launch.updates.numel():
        kernels.update_kernel[(launch.updates.numel(),)](
            table,
            launch.updates,
            state,
            at_row,
            step,
            *(numbers + (0.0,) * (9 - len(numbers))),
            rule=launch.rule,
            gradient_dtype=launch.gradient,
            update=launch.update,
            moments=launch.moments,
            aligned=aligned,
            on_device=state is not None,
            rows=ROWS,
            tiles=TILES,
            **kernels.LAUNCH,
        )


@cache
def _tables(device: torch.device) -> Tables:
    return Tables(device)


def run_cuda(tasks: Sequence[StepTask], plan: Plan) -> None:
    """Take a step in one launch per weight dtype; bit-identical to ``reference.run_torch``.

    Raises:
        PrecisionError: In a CUDA graph capture: replays would repeat one step's constants.
    """
    kernels = triton_kernels()
    assert isinstance(kernels, ModuleType)
    device = tasks[0].weight.device
    if is_capturing(device):
        raise PrecisionError(
            "optimizer.step() inside a CUDA graph would repeat this step's bias correction and "
            "random bits at every replay; use halfstep.Precision.captured instead"
        )
    numbers = tuple(map(float, (plan.multiplier, *plan.constants)))  # an int would recompile
    with on(device):
        for dtype in dict.fromkeys(task.weight.dtype for task in tasks):
            found = [task for task in tasks if task.weight.dtype == dtype]
            content, aligned = rows(found, plan.seed)
            table = _tables(device).get(tuple(content))
            launch = make_launch(found, plan, 0)
            launch_update(kernels, launch, table, aligned=aligned, numbers=numbers, step=plan.step)
    increment_version([tensor for task in tasks for tensor in task.written])
