"""Which kernel takes a step."""

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
    """What does the arithmetic of a step; all kernels give the same bits."""

    name: str  # what it is, and where it is no fast one why, for people to read
    run: Callable[[Sequence[StepTask], Plan], None]  # takes the step of tensors that share a plan
    # the 2-norm of all gradients together: fp32 scalar, NaN or inf if an element is. They are
    # dense, fp32, bf16 or fp16, and on one device
    norm: Callable[[Sequence[Tensor]], Tensor]


def kernel_for(device_type: str) -> Kernel:
    """The fastest kernel that is there for ``"cpu"``, ``"cuda"`` or another type of device."""
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
    """The compiled kernel, or torch operations for a rule that it does not have."""

    def run(tasks: Sequence[StepTask], plan: Plan) -> None:
        (compiled if plan.algorithm.name in RULES else run_torch)(tasks, plan)

    return run
