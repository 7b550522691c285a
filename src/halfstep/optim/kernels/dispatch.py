"""Which kernel takes a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import halfstep.optim.kernels.cuda as cuda
from halfstep.optim.kernels.cpu import native_kernel
from halfstep.optim.kernels.reference import Plan, Task, run_torch
from halfstep.precision.scaling.gradients import global_norm


def run(tasks: Sequence[Task], plan: Plan) -> None:
    """Take the step with the fastest kernel that is there; all of them give the same bits."""
    kind = tasks[0].weight.device.type
    if kind == "cpu":
        kernel = native_kernel()
        if not isinstance(kernel, str):
            kernel.run(tasks, plan)
            return
    elif kind == "cuda" and not isinstance(cuda.triton_kernels(), str):
        cuda.run(tasks, plan)
        return
    run_torch(tasks, plan)


def norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together: fp32 scalar, NaN or inf if an element is.

    Args:
        gradients: Dense, fp32, bf16 or fp16, on one device.
    """
    if gradients and gradients[0].device.type == "cpu":
        kernel = native_kernel()
        if not isinstance(kernel, str):
            return torch.tensor(kernel.norm(gradients), dtype=torch.float32)
    return global_norm(gradients)


def kernel_name(device: torch.device) -> str:
    """What :func:`run` would use on a device, and why, for people to read."""
    found: object = "no kernel for this device"
    name = ""
    if device.type == "cpu":
        found, name = native_kernel(), "a kernel compiled for this CPU"
    elif device.type == "cuda":
        found, name = cuda.triton_kernels(), "Triton kernels"
    return f"torch operations ({found})" if isinstance(found, str) else name
