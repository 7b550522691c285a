"""Chooses the kernel that takes a step, by device and installed compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

import halfstep.optim.kernels.cuda as cuda
from halfstep.optim.kernels.cpu import RULES, native_kernel
from halfstep.optim.kernels.reference import Plan, run_torch
from halfstep.optim.storage.state import StepTask
from halfstep.precision.scaling.gradients import global_norm


@dataclass(frozen=True, slots=True)
class Kernel:
    """The functions that do the arithmetic of a step; all kernels give the same bits."""

    name: str  # a description for people, with the reason if it is not a fast kernel
    run: Callable[[Sequence[StepTask], Plan], None]  # takes a step on tensors that share a plan
    # the 2-norm of all gradients together: an fp32 scalar, NaN or inf if an element is. Gradients
    # are dense, fp32, bf16 or fp16, and on one device
    norm: Callable[[Sequence[Tensor]], Tensor]


def kernel_for(device_type: str) -> Kernel:
    """The fastest kernel available for ``"cpu"``, ``"cuda"`` or another device type."""
    reason: object = "no kernel for this device"
    if device_type == "cpu":
        native = reason = native_kernel()
        if not isinstance(native, str):
            return Kernel("a kernel compiled for this CPU", _or_torch(native.run), native.norm)
    elif device_type == "cuda":
        reason = cuda.triton_kernels()
        if not isinstance(reason, str):
            return Kernel("Triton kernels", _or_torch(cuda.run_cuda), global_norm)
    return Kernel(f"torch operations ({reason})", run_torch, global_norm)


def _or_torch(
    compiled: Callable[[Sequence[StepTask], Plan], None],
) -> Callable[[Sequence[StepTask], Plan], None]:
    """A function that runs the compiled kernel, or torch operations for a rule it lacks."""

    def run(tasks: Sequence[StepTask], plan: Plan) -> None:
        (compiled if plan.algorithm.name in RULES else run_torch)(tasks, plan)

    return run
