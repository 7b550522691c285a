"""GELU, dropout, norms and the cross-entropy over bf16 or fp32 rows on a CPU, by ``rows.cpp``.

Each computes in fp32 whatever it reads and writes, so no widened copy is made, nor in the backward.

Shapes: N rows, V columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels.library import (
    address,
    by_torch,
    differentiated,
    drawn_seed,
    library,
    new,
    strided_address,
)

_BF16, _FP32 = torch.bfloat16, torch.float32


def is_bf16(dtype: torch.dtype) -> bool:
    """Whether numbers are bf16 and not fp32, for a kernel that takes both; others are refused."""
    if dtype not in (_BF16, _FP32):
        raise TypeError(f"the kernel takes bf16 and fp32 numbers, got {dtype}")
    return dtype == _BF16


def gelu_tanh(x: Tensor) -> Tensor:
    """``F.gelu(x, approximate="tanh")`` of a bf16 tensor, of the same shape.

    **Source:** Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
    """
    y: Tensor = _GeluTanh.apply(x)  # type: ignore[no-untyped-call]
    return y


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu_tanh_or_slope(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if by_torch(grad):
            return differentiated(partial(F.gelu, approximate="tanh"), (x,), grad)[0]
        return gelu_tanh_or_slope(x, grad)


def gelu_tanh_or_slope(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """The function of a bf16 tensor, or its slope times a gradient where one is given."""
    x = x.contiguous()
    grad = None if grad is None else grad.contiguous()
    out, n = torch.empty_like(x), x.numel()
    library().halfstep_gelu_tanh(
        *(address(each, n, _BF16) for each in (x, grad, out)), n, torch.get_num_threads()
    )
    return out


def dropout(x: Tensor, p: float) -> Tensor:
    """``F.dropout`` of bf16 or fp32 numbers, ``0 < p < 1``; backward draws again, no mask is kept.

    Seeded by torch's global generator, but not with the masks that torch draws from that seed.
    """
    y: Tensor = _Dropout.apply(x, p, drawn_seed())  # type: ignore[no-untyped-call]
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.draw = (p, seed)
        return _dropped(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if by_torch(grad):
            ones = torch.ones(grad.shape, dtype=grad.dtype, device="cpu")
            return grad * _dropped(ones, *ctx.draw), None, None
        return _dropped(grad, *ctx.draw), None, None


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    library().halfstep_dropout(
        address(x, n, x.dtype), is_bf16(x.dtype), address(y, n, x.dtype), p, 1 / (1 - p), seed, n,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def norm(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    *,
    centred: bool = True,
) -> Tensor:
    """LayerNorm over the last dimension, of bf16 or fp32 numbers, with statistics in fp32.

    Args:
        x: ``(..., C)``, bf16 or fp32.
        gain: ``(C,)`` of any floating dtype, or None, as ``bias`` is.
        bias: Likewise.
        epsilon: Added to the variance.
        dtype: The result's, bf16 or fp32.
        centred: False divides by the root of the mean square instead: RMSNorm.

    **Source:** Ba et al. 2016, "Layer Normalization", eq. 4; Zhang and Sennrich 2019, "Root Mean
    Square Layer Normalization", eq. 4.
    """
    y: Tensor = _Norm.apply(x, gain, bias, epsilon, dtype, centred)  # type: ignore[no-untyped-call]
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor | None, bias: Tensor | None, epsilon: float,
        dtype: torch.dtype, centred: bool,
    ) -> Tensor:  # fmt: skip
        y, mean, inverse = normalised(x, gain, bias, epsilon, dtype, centred)
        ctx.save_for_backward(x, gain, bias, mean, inverse)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, bias, mean, inverse = ctx.saved_tensors
        if by_torch(grad):
            defined = partial(_normed, epsilon=ctx.epsilon, centred=mean is not None)
            grads = differentiated(defined, (x, gain, bias), grad.float())
        else:
            grad_x, sums = norm_gradients(x, gain, grad, mean, inverse)
            parameters = zip((gain, bias), sums[:2], strict=True)
            wide = (None if p is None else total.to(gradient_dtype(p)) for p, total in parameters)
            grads = (grad_x, *wide)
        return (*grads, None, None, None)


def normalised(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    centred: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What :func:`norm` returns, and each row's mean (if centred) and inverse deviation, fp32."""
    x = x.contiguous()
    n, columns = x.numel(), x.shape[-1]
    rows = n // columns
    gain, bias = (None if p is None else p.float().contiguous() for p in (gain, bias))
    y, inverse = x.new_empty(x.shape, dtype=dtype), new(rows)
    mean = new(rows) if centred else None
    library().halfstep_norm(
        address(x, n, x.dtype), is_bf16(x.dtype), None, None, None,
        address(gain, columns, _FP32), address(bias, columns, _FP32), epsilon,
        address(y, n, dtype), is_bf16(dtype), address(mean, rows, _FP32),
        address(inverse, rows, _FP32), rows, columns, torch.get_num_threads(),
    )  # fmt: skip
    return y, mean, inverse


def norm_gradients(
    x: Tensor,
    gain: Tensor | None,
    grad: Tensor,
    mean: Tensor | None,
    inverse: Tensor,
    passed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a norm's operand in its dtype; those of gain, bias and shift, (3, C) fp32.

    ``passed``, contiguous and of the dtype of ``x``, is the gradient of what went past the norm,
    and becomes part of that of ``x``, whose sum over rows is the last of the three.
    """
    x, grad = x.contiguous(), grad.contiguous()
    gain = None if gain is None else gain.float().contiguous()
    made, threads = torch.empty_like(x), torch.get_num_threads()
    n, columns, dtype = x.numel(), x.shape[-1], x.dtype
    rows, sums = n // columns, new(threads, 3, columns).zero_()
    library().halfstep_norm_backward(
        address(x, n, dtype), is_bf16(dtype), address(gain, columns, _FP32),
        address(grad, n, grad.dtype), is_bf16(grad.dtype), address(passed, n, dtype),
        address(mean, rows, _FP32), address(inverse, rows, _FP32), address(made, n, dtype),
        address(sums, sums.numel(), _FP32), rows, columns, threads,
    )  # fmt: skip
    return made, sums.sum(0)


def add_and_normalise(
    x: Tensor, added: Tensor, shift: Tensor, gain: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """A stream with a block's result and its bias added; then its LayerNorm in bf16, in one pass.

    ``x`` is ``(N, C)`` bf16 or fp32, as the sum; ``added`` bf16; the three vectors ``(C,)`` fp32.
    """
    total, y = torch.empty_like(x), torch.empty_like(added)
    mean, inverse = new(2, len(x))
    (rows, columns), n, dtype = x.shape, x.numel(), x.dtype
    library().halfstep_norm(
        address(x, n, dtype), is_bf16(dtype), address(added, n, _BF16),
        address(shift, columns, _FP32), address(total, n, dtype), address(gain, columns, _FP32),
        address(bias, columns, _FP32), epsilon, address(y, n, _BF16), True,
        address(mean, rows, _FP32), address(inverse, rows, _FP32), rows, columns,
        torch.get_num_threads(),
    )  # fmt: skip
    return total, y


def add(x: Tensor, added: Tensor, shift: Tensor) -> Tensor:
    """The first result of :func:`add_and_normalise` alone, for ``(..., C)`` of any shape."""
    total, n, columns, dtype = torch.empty_like(x), x.numel(), x.shape[-1], x.dtype
    library().halfstep_norm(
        address(x, n, dtype), is_bf16(dtype), address(added, n, _BF16),
        address(shift, columns, _FP32), address(total, n, dtype),
        None, None, 0.0, None, True, None, None, n // columns, columns, torch.get_num_threads(),
    )  # fmt: skip
    return total


def gelu_of_rows(x: Tensor, bias: Tensor) -> Tensor:
    """The tanh GELU of ``x + bias``: ``(N, C)`` bf16 and ``(C,)`` fp32."""
    out, n, columns = torch.empty_like(x), x.numel(), x.shape[-1]
    library().halfstep_gelu_tanh_rows(
        address(x, n, _BF16), address(bias, columns, _FP32), None, address(out, n, _BF16), None,
        *x.shape, torch.get_num_threads(),
    )  # fmt: skip
    return out


def gelu_of_rows_backward_(grad: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Turn the gradient of :func:`gelu_of_rows` into that of ``x``; return that of ``bias``."""
    threads, n, columns = torch.get_num_threads(), x.numel(), x.shape[-1]
    sums = new(threads, columns).zero_()
    gradient = address(grad, n, _BF16)
    library().halfstep_gelu_tanh_rows(
        address(x, n, _BF16), address(bias, columns, _FP32), gradient, gradient,
        address(sums, sums.numel(), _FP32), *x.shape, threads,
    )  # fmt: skip
    return sums.sum(0)


def _normed(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, *, epsilon: float, centred: bool
) -> Tensor:
    """A norm by torch's operations, in fp32."""
    gain, bias = (None if t is None else t.float() for t in (gain, bias))
    if centred:
        return F.layer_norm(x.float(), x.shape[-1:], gain, bias, epsilon)
    return F.rms_norm(x.float(), x.shape[-1:], gain, epsilon)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a gradient is kept; ``torch.compile`` gets the parameter's own."""
    eager_leaf = not torch.compiler.is_compiling() and parameter.is_leaf
    asked = parameter.grad_dtype if eager_leaf else None
    return parameter.dtype if asked is None else asked


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
    """``logsumexp(logits) - logits[target]`` of each row in fp32; 0 where the target is ignored.

    Logits are bf16 or fp32, each row contiguous; targets int64. Rows with ``ignore_index`` get no
    gradient.
    """
    losses_N: Tensor = _CrossEntropy.apply(logits_NV, targets_N, ignore_index)  # type: ignore[no-untyped-call]
    return losses_N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        targets = targets.contiguous()
        loss, base = new(len(logits)), new(len(logits), 2)
        _losses(logits, targets, ignore_index, loss, base)
        ctx.save_for_backward(logits, targets, base)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, base = ctx.saved_tensors
        if by_torch(grad):
            options: Any = {"ignore_index": ctx.ignore_index, "reduction": "none"}
            made = differentiated(
                lambda x: F.cross_entropy(x.float(), targets, **options), (logits,), grad
            )
            return (*made, None, None)
        grad = grad.float().masked_fill(targets == ctx.ignore_index, 0)
        made = logits.new_empty(logits.shape)
        _errors(logits, targets, base, grad, made)
        return made, None, None


def _losses(logits: Tensor, targets: Tensor, ignore: int, loss: Tensor, base: Tensor) -> None:
    """Write each row's loss (N,), and what its backward needs (N, 2)."""
    rows, narrow = len(logits), is_bf16(logits.dtype)
    wanted = address(targets, rows, torch.int64)
    wrong = ((targets < 0) | (targets >= logits.shape[1])) & (targets != ignore)
    if wrong.any():
        raise IndexError(f"Target {int(targets[wrong][0])} is out of bounds.")  # as torch says it
    library().halfstep_cross_entropy(
        strided_address(logits, logits.shape, logits.dtype), narrow, logits.stride(0),
        wanted, ignore, address(loss, rows, _FP32), address(base, 2 * rows, _FP32),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip


def _errors(logits: Tensor, targets: Tensor, base: Tensor, scale: Tensor, made: Tensor) -> None:
    """Write the gradient of the losses, each times its scale (N,); ``made`` may be ``logits``."""
    rows, narrow = len(logits), is_bf16(logits.dtype)
    library().halfstep_cross_entropy_backward(
        strided_address(logits, logits.shape, logits.dtype), narrow, logits.stride(0),
        address(targets, rows, torch.int64), address(base, 2 * rows, _FP32),
        address(scale, rows, _FP32), strided_address(made, logits.shape, logits.dtype),
        made.stride(0), *logits.shape, torch.get_num_threads(),
    )  # fmt: skip


def softmax_errors_(logits_NV: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
    """Turn logits into ``softmax(logits) - onehot(target)`` in place; return the losses, fp32.

    What :func:`cross_entropy` computes, and its gradient in the memory of its operand. A row whose
    target is ignored becomes 0, and so does its loss.
    """
    targets_N = targets_N.contiguous()
    loss, base = new(len(logits_NV)), new(len(logits_NV), 2)
    _losses(logits_NV, targets_N, ignore_index, loss, base)
    _errors(logits_NV, targets_N, base, (targets_N != ignore_index).float(), logits_NV)
    return loss
