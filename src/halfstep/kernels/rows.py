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


def is_bf16(dtype: torch.dtype) -> bool:
    """Whether numbers are bf16 and not fp32, for a kernel that takes both; others are refused.

    Raises:
        TypeError: The dtype is neither.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the kernel takes bf16 and fp32 numbers, got {dtype}")
    return dtype == torch.bfloat16


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


def layer_norm(
    x: Tensor, gain: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """``F.layer_norm`` over the last dimension, of bf16 or fp32 numbers, with statistics in fp32.

    Args:
        x: ``(..., C)``, bf16 or fp32.
        gain: ``(C,)``, of any floating dtype, as ``bias`` is.
        bias: Likewise, or None.
        epsilon: Added to the variance.
        dtype: The result's, bf16 or fp32. Its gradient has it too; that of ``x`` has ``x``'s.
    """
    y: Tensor = _LayerNorm.apply(x, gain, bias, epsilon, dtype)  # type: ignore[no-untyped-call]
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        y, mean, inverse = normalised(x, gain, bias, epsilon, dtype)
        ctx.save_for_backward(x, gain, bias, mean, inverse)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, bias, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # the mark of create_graph=True
            given = [t for t in (x, gain, bias) if t is not None]
            with torch.enable_grad():
                wide = [t.float() for t in given]
                y = F.layer_norm(wide[0], gain.shape, *wide[1:], eps=ctx.epsilon)
                grads = torch.autograd.grad(y, given, grad.float(), create_graph=True)
                return (*grads, *(None for _ in range(5 - len(given))))
        grad_x, sums = norm_gradients(x, gain, grad, mean, inverse)
        grad_gain, grad_bias = (
            None if t is None else total.to(gradient_dtype(t))
            for t, total in zip((gain, bias), sums, strict=True)
        )
        return grad_x, grad_gain, grad_bias, None, None


def normalised(
    x: Tensor, gain: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`layer_norm` returns, and each row's mean and inverse deviation in fp32."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    gain, bias = gain.float(), None if bias is None else bias.float()
    y, statistics = torch.empty(x.shape, dtype=dtype), torch.empty(2, rows)
    library().halfstep_norm(
        address(x), is_bf16(x.dtype), address(gain), address(bias), epsilon,
        address(y), is_bf16(dtype), address(statistics[0]), address(statistics[1]),
        rows, columns, torch.get_num_threads(),
    )  # fmt: skip
    return y, statistics[0], statistics[1]


def norm_gradients(
    x: Tensor, gain: Tensor, grad: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of ``x`` in its dtype, and those of gain and bias as ``(2, C)`` fp32."""
    x, grad, gain = x.contiguous(), grad.contiguous(), gain.float()
    made, threads = torch.empty_like(x), torch.get_num_threads()
    sums = torch.zeros(threads, 2, x.shape[-1])
    library().halfstep_norm_backward(
        address(x), is_bf16(x.dtype), address(gain), address(grad),
        is_bf16(grad.dtype), address(mean), address(inverse), address(made),
        address(sums), len(mean), x.shape[-1], threads,
    )  # fmt: skip
    return made, sums.sum(0)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a gradient is kept: wider than the parameter's where it says so.

    ``torch.compile`` cannot read that, and gets the parameter's own.
    """
    eager_leaf = not torch.compiler.is_compiling() and parameter.is_leaf
    asked = parameter.grad_dtype if eager_leaf else None
    return parameter.dtype if asked is None else asked


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
            address(logits), is_bf16(logits.dtype), logits.stride(0), address(targets),
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
            address(logits), is_bf16(logits.dtype), logits.stride(0), address(targets),
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
    narrow, threads = is_bf16(logits_NV.dtype), torch.get_num_threads()
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
