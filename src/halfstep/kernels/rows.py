"""Activations and the softmax cross-entropy over bf16 tensors on a CPU, by ``rows.cpp``.

Each reads its operand once, computes in fp32 and writes bf16: no widened copy is made, in the
backward neither.

Shapes: N rows, V columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels.forward import address, library

Activation = Literal["gelu", "gelu_tanh", "silu"]
_KINDS: dict[Activation, int] = {"gelu": 0, "gelu_tanh": 1, "silu": 2}
_DEFINITION: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def activation(x: Tensor, kind: Activation) -> Tensor:
    """GELU, its tanh approximation, or SiLU of a bf16 tensor, of the same shape.

    The normal distribution function in GELU is within 2e-6 of itself, which bf16 does not see.

    **Source:** Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; Elfwing et al. 2017.
    """
    y: Tensor = _Activation.apply(x, kind)  # type: ignore[no-untyped-call]
    return y


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Activation) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        return _run(_KINDS[kind], x, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the mark of create_graph=True
            with torch.enable_grad():
                y = _DEFINITION[ctx.kind](x)
                return (*torch.autograd.grad(y, x, grad, create_graph=True), None)
        return _run(_KINDS[ctx.kind], x, grad), None


def _run(kind: int, x: Tensor, grad: Tensor | None) -> Tensor:
    x = x.contiguous()
    grad = None if grad is None else grad.contiguous()
    out = torch.empty_like(x)
    library().halfstep_activation(
        kind, address(x), address(grad), address(out), x.numel(), torch.get_num_threads()
    )
    return out


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
    """``logsumexp(logits) - logits[target]`` of each row in fp32; 0 where the target is ignored.

    Args:
        logits_NV: ``(N, V)`` bf16 or fp32, each row contiguous.
        targets_N: ``(N,)`` int64, in range or ``ignore_index``; the caller has looked.
        ignore_index: Rows with this target add nothing, and get no gradient.
    """
    losses_N: Tensor = _CrossEntropy.apply(logits_NV, targets_N, ignore_index)  # type: ignore[no-untyped-call]
    return losses_N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        targets = targets.contiguous()
        loss, base = torch.empty(len(logits)), torch.empty(len(logits), 2)
        library().halfstep_cross_entropy(
            address(logits), logits.dtype == torch.bfloat16, logits.stride(0), address(targets),
            ignore_index, address(loss), address(base), *logits.shape, torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, base)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, base = ctx.saved_tensors
        if torch.is_grad_enabled():  # the mark of create_graph=True
            with torch.enable_grad():
                losses = F.cross_entropy(
                    logits.float(), targets, ignore_index=ctx.ignore_index, reduction="none"
                )
                return (*torch.autograd.grad(losses, logits, grad, create_graph=True), None, None)
        grad = grad.float().masked_fill(targets == ctx.ignore_index, 0)
        made = torch.empty(logits.shape, dtype=logits.dtype)
        library().halfstep_cross_entropy_backward(
            address(logits), logits.dtype == torch.bfloat16, logits.stride(0), address(targets),
            address(base), address(grad), address(made), made.stride(0), *logits.shape,
            torch.get_num_threads(),
        )  # fmt: skip
        return made, None, None


def softmax_errors_(logits_NV: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
    """Turn logits into ``softmax(logits) - onehot(target)`` in place; return the losses, fp32.

    What :func:`cross_entropy` computes, and its gradient in the memory of its operand. A row whose
    target is ignored becomes 0, and so is its loss.
    """
    targets_N = targets_N.contiguous()
    loss, base = torch.empty(len(logits_NV)), torch.empty(len(logits_NV), 2)
    scale = (targets_N != ignore_index).float()
    narrow, threads = logits_NV.dtype == torch.bfloat16, torch.get_num_threads()
    logits, stride = address(logits_NV), logits_NV.stride(0)
    library().halfstep_cross_entropy(
        logits, narrow, stride, address(targets_N), ignore_index, address(loss), address(base),
        *logits_NV.shape, threads,
    )  # fmt: skip
    library().halfstep_cross_entropy_backward(
        logits, narrow, stride, address(targets_N), address(base), address(scale), logits, stride,
        *logits_NV.shape, threads,
    )  # fmt: skip
    return loss
