"""Kernels that take one optimizer step on many tensors, chosen by device and compilers.

All give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import halfstep.optim.kernels.cuda as cuda
import halfstep.optim.kernels.reference as reference
from halfstep.optim.kernels.cpu import RULES, native_kernel
from halfstep.optim.kernels.reference import Plan
from halfstep.optim.rules import SET
from halfstep.optim.state import Batch
from halfstep.precision.masters.rounding import Update
from halfstep.precision.scaling.gradients import global_norm


def run(batch: Batch, plan: Plan) -> None:
    """Take a step on tensors that share a plan, by the fastest kernel that there is for them."""
    rule = plan.algorithm.name
    if rule in (*RULES, SET.name) and _by_triton(batch, plan):
        cuda.run_cuda(batch, plan)
        return
    compiled = native_kernel() if batch.tasks[0].weight.is_cpu and rule in RULES else ""
    if isinstance(compiled, str):
        reference.run_torch(batch, plan)
    else:
        compiled.run(batch, plan)


def norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together: an fp32 scalar, NaN or inf if an element is.

    Gradients are dense, fp32, bf16 or fp16, and on one device.
    """
    compiled = native_kernel() if not gradients or gradients[0].is_cpu else ""
    return global_norm(gradients) if isinstance(compiled, str) else compiled.norm(gradients)


def read_masters(batch: Batch, values: Sequence[Tensor], update: Update) -> None:
    """Write the masters of each task into the fp32 tensor for it."""
    (cuda if _by_triton(batch) else reference).read_masters(batch, values, update)


def _by_triton(batch: Batch, plan: Plan | None = None) -> bool:
    """Whether the Triton kernels take a batch: on CUDA, and where the device has decided."""
    decided = plan is not None and plan.decision is not None
    on_gpu = decided or batch.tasks[0].weight.is_cuda
    return on_gpu and not isinstance(cuda.triton_kernels(), str)
