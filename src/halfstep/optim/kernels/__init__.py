"""Kernels that take one optimizer step on many tensors; the choice, by device and compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

import halfstep.optim.kernels.cuda as cuda
from halfstep.optim.kernels.cpu import RULES, native_kernel
from halfstep.optim.kernels.reference import Plan, read_masters, run_torch
from halfstep.optim.state import Batch, elements_below
from halfstep.precision.scaling.gradients import global_norm

Run = Callable[[Batch, Plan], None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The functions that do the arithmetic of a step; all kernels give the same bits."""

    name: str  # a description for people, with the reason if it is not a fast kernel
    run: Run  # takes a step on tensors that share a plan
    # the 2-norm of all gradients together: an fp32 scalar, NaN or inf if an element is. Gradients
    # are dense, fp32, bf16 or fp16, and on one device
    norm: Callable[[Sequence[Tensor]], Tensor]
    # how many elements of each 8-bit second moment are below its window, after a step
    below: Callable[[Batch], Tensor] = elements_below


def kernel_for(device_type: str, rule: str = "adamw") -> Kernel:
    """The fastest kernel available for ``"cpu"``, ``"cuda"`` or another device type.

    Args:
        device_type: Of the tensors.
        rule: The name of the update rule; compiled kernels know some of them.
    """
    reason: object = "no kernel for this device"
    norm = global_norm
    if device_type == "cpu":
        native = reason = native_kernel()
        if not isinstance(native, str):
            if rule in RULES:
                return Kernel("a kernel compiled for this CPU", native.run, native.norm)
            reason = f"no compiled kernel has the rule {rule}"
            norm = native.norm
    elif device_type == "cuda":
        reason = cuda.triton_kernels()
        if not isinstance(reason, str):
            if rule in RULES:
                return Kernel("Triton kernels", cuda.run_cuda, norm, cuda.elements_below)
            reason = f"no Triton kernel has the rule {rule}"
    return Kernel(f"torch operations ({reason})", run_torch, norm)


def masters_kernel(device_type: str) -> tuple[Run, Callable[..., None]]:
    """What stores masters, as a step whose rule is ``SET``, and what reads them."""
    if device_type == "cuda" and not isinstance(cuda.triton_kernels(), str):
        return cuda.run_cuda, cuda.read_masters
    return run_torch, read_masters
