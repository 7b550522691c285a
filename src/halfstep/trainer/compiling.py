"""Whether a run compiles its model, by ``torch.compile``, and how; what else CUDA is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan
from halfstep.precision.casting.autocast import support
from halfstep.precision.policy.policy import LOW, PrecisionPolicy
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.step import Batch, LossSum
from halfstep.trainer.tasks.task import Task

Config = TypeVar("Config", bound=BaseConfig)

WORTHWHILE = 3000
"""Steps from which ``auto`` compiles on CUDA.

A GPT-2 of 124 M parameters took over 28 seconds to compile on an H200, 4 from torch's cache, and a
compiled step saved 11 of 45 ms (benchmarks/results/h100-2026-11-27.jsonl).
"""


def with_choice(config: Config, policy: PrecisionPolicy, device: torch.device) -> Config:
    """Decide what ``compile = "auto"`` means here, and say ``yes`` or ``no`` in its place.

    On a CPU it means no. A GPT of 14 M parameters took 55 s to compile there; in ``bf16-mixed`` its
    step by halfstep's own kernels takes 0.65 of the time of the compiled one, in ``fp32`` 1.02
    (docs/training.md).
    """
    run, native = config.run, support(policy, device).status == "native"
    wins = device.type == "cuda" and native and has_triton()
    if run.compile == "auto":
        run = replace(run, compile="yes" if wins and run.max_steps >= WORTHWHILE else "no")
    return replace(config, run=run)


def compiled_(task: Task, plan: ParallelPlan, layout: Layout) -> LossSum:
    """Return the task's loss, compiled; where ranks hold parts of the weights, by block.

    The hooks that gather a block's weights run around its graph, not in it; sums over tensor ranks
    are in it. Where batches differ in
    their lengths, one graph is for all of them, and is not compiled again for the next length.
    """
    if layout.shard * layout.tensor > 1 or task.by_block:
        for block in plan.blocks:
            block.forward = torch.compile(block.forward)
        return task.loss_sum
    compiled: LossSum = torch.compile(task.loss_sum)
    if not task.lengths_vary:
        return compiled

    def loss_sum(batch: Batch) -> tuple[Tensor, Tensor]:
        for tensor in tree_leaves(batch):
            torch._dynamo.maybe_mark_dynamic(tensor, [*range(tensor.dim())])
        return compiled(batch)

    return loss_sum


def compile_seconds() -> float:
    """Return the seconds that this process has spent in ``torch.compile`` so far."""
    known: Any = torch._dynamo.utils.calculate_time_spent()
    return float(known["total_wall_time"])


def tune_(model: nn.Module, policy: PrecisionPolicy, device: torch.device) -> list[str]:
    """Lay convolutions in 16 bits out as CUDA runs them fastest, and say what holds on CUDA."""
    notes = []
    if device.type == "cuda" and policy.compute_dtype == torch.float32:
        off = "off, also in convolutions, for which torch's default is on (--precision tf32)"
        notes.append(f"TF32 is {'on' if policy.tf32 else off}")
    if _has_images(model, device):
        notes.append("cudnn.benchmark is on: the first step of each shape takes longer")
        if policy.compute_dtype in LOW:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            notes.append("images are laid out as channels_last")
    return notes


@contextmanager
def measured_convolutions(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let cuDNN measure which of its convolutions are fast, where a model of images trains."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or _has_images(model, device)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _has_images(model: nn.Module, device: torch.device) -> bool:
    return device.type == "cuda" and any(isinstance(m, nn.Conv2d) for m in model.modules())
