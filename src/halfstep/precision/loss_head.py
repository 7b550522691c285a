"""Fuses the head matmul and the softmax cross-entropy, so that all logits never exist at once.

Logits are the largest tensor of a language model: 8192 tokens of GPT-2 make 1.6 GB of them in fp32,
and autograd keeps them until their gradient is done. Here they exist for one chunk of rows at a
time: a chunk goes from logits to loss to gradients before the next begins, and backward only
multiplies finished gradients by the incoming scalar, in place. Logits become their own gradients in
place, by a kernel on a GPU, and on a CPU if they are bf16. ``docs/decisions/0002-loss-head.md``
gives the reasons, the alternatives and their measured times.

Shapes: N tokens, R tokens of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import os
from functools import cache, partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from halfstep.errors import DataError
from halfstep.kernels.rows import cross_entropy, gradient_dtype, softmax_errors_
from halfstep.precision.casting.cast import WITH_AUTOCAST
from halfstep.precision.casting.op_casts import may_run

CHUNK, MAX_ROWS = 2**24, 512
"""Maximal number of logits in a chunk, and of rows. **Source:** tables 2 and 3 of decision 0002."""

CHUNK_ON_GPU = 2**28
"""Logits where a GPU's kernel takes them: 512 MiB in 16 bits, so that few chunks are added up."""

FP16_UNIT = 2.0**15
"""What gradients of fp16 logits are multiplied by: none exceeds 1, and fp16 ends at 65504.

Probabilities of 2^-29 keep their digits so. The matmuls add up in fp32 and divide by it again.
"""

VOCABULARY_BLOCK = 4096
"""How many rows of the weight get their gradient in one 16-bit product on a CPU."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight, bias), target)`` without all logits at once.

    The matmuls run in autocast's dtype where autocast is on, else in the wider dtype of ``x`` and
    ``weight``; all else is fp32 (fp64 for fp64 operands). The host never waits for a GPU.

    Args:
        x: Final hidden states, ``(..., D)``.
        weight: Head weight, ``(V, D)``, which is the embedding table if tied.
        target: int64, the shape of ``x`` without its last dim, each in ``[0, V)``, or
            ``ignore_index``: such a token does not count. On a GPU, any other makes the loss NaN.
        bias: Of the head, ``(V,)``.
        ignore_index: As in ``F.cross_entropy``.
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.

    Returns:
        The loss in nats, an fp32 scalar with gradient.

    Raises:
        DataError: If the targets do not fit, or one on a CPU is out of range.

    **Source:** with z = W x, l = logsumexp(z) - z_t and dl/dz = softmax(z) - onehot(t).
    """
    _check(x, target, reduction)
    on = torch.is_grad_enabled()
    needed = [on and t is not None and t.requires_grad for t in (x, weight, bias)]
    # Modes that look on see nothing in an operator, and AOTAutograd does not cache a Function.
    run: Any = _operator if torch.compiler.is_compiling() else _Function.apply
    rows, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    loss, *_ = run(rows, weight, bias, target, ignore_index, matmul_dtype(x, weight), *needed)
    if reduction == "mean":
        count = (target != ignore_index).sum()
        # NaN where none counts, as in torch, with gradients of 0: those of 0 / 0 would be NaN
        loss = torch.where(count > 0, loss / count.clamp(min=1), torch.nan)
    return cast(Tensor, loss)


def _check(x: Tensor, target: Tensor, reduction: str) -> None:
    if target.dtype != torch.int64:
        raise DataError(
            f"targets are {target.dtype}; allowed: torch.int64, which targets.long() makes"
        )
    if target.shape != x.shape[:-1] or reduction not in ("mean", "sum"):
        raise DataError(
            f"targets have shape {tuple(target.shape)} and reduction {reduction!r}; allowed: "
            f"{tuple(x.shape[:-1])}, that of x without its last dim, and 'mean' or 'sum'"
        )


def _compute(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    *needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss sum and its gradients, in fp32 at least; empty what is not needed."""
    results = _results(x_ND, weight_VD, bias_V, target_N, ignore_index, dtype, *needed)
    loss_sum, grad_x_ND, grad_weight_VD, grad_bias_V = results
    need_x, need_weight, need_bias = needed
    vocab, unit = len(weight_VD), FP16_UNIT if dtype == torch.float16 else 1.0
    seen = torch._C._len_torch_dispatch_stack() > 0
    if x_ND.device.type == "cpu" and not seen:
        _require_targets_in_range(target_N, vocab, ignore_index)
    ignored_N1 = (target_N == ignore_index).unsqueeze(1)
    # Once, not once per chunk. Ignored rows may hold anything, and 0 times NaN were no 0 below.
    xs_ND, weight = x_ND.to(dtype).masked_fill(ignored_N1, 0), weight_VD.to(dtype)
    bias = None if bias_V is None else bias_V.to(dtype)
    on_gpu = _kernels(x_ND.device.type, dtype) is not None
    most = CHUNK_ON_GPU // vocab if on_gpu else min(CHUNK // vocab, MAX_ROWS)
    chunks = -(-len(x_ND) // max(most, 1)) or 1
    rows = -(-len(x_ND) // chunks)  # the same number in every chunk
    memory = xs_ND.new_empty(0 if seen else rows, -(-vocab // 16) * 16 if on_gpu else vocab)
    for start in range(0, len(xs_ND), rows or 1):
        here = slice(start, start + rows)
        x_RD, logits_RV = xs_ND[here], memory[: len(xs_ND) - start, :vocab]
        logits_RV = _matmul(x_RD, weight.t(), logits_RV, bias)
        how = (ignore_index, unit, any(needed))
        losses_R, error_RV = _losses_and_errors(logits_RV, target_N[here], *how)
        loss_sum += losses_R.sum()
        if need_x:
            _product_(grad_x_ND[here], error_RV, weight, 0, unit)
        if need_weight:
            _product_(grad_weight_VD, error_RV.t(), x_RD, min(start, 1), unit)
        if need_bias:
            grad_bias_V += error_RV.sum(0, dtype=grad_bias_V.dtype) / unit
        del logits_RV, error_RV  # before the next ones are made
    return results


def _results(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for what :func:`_compute` returns; the loss sum begins at 0."""
    _, _, dtype, *needed = rest
    how: Any = {"dtype": torch.promote_types(dtype, torch.float32), "device": x_ND.device}
    of_x, of_weight, of_bias = (
        0 if t is None or not need else t.shape
        for t, need in zip((x_ND, weight_VD, bias_V), needed, strict=True)
    )
    weight = (torch.empty if len(x_ND) else torch.zeros)(of_weight, **how)
    return torch.zeros((), **how), torch.empty(of_x, **how), weight, torch.zeros(of_bias, **how)


def _losses_and_errors(
    logits_RV: Tensor, target_R: Tensor, ignore_index: int, unit: float, write: bool
) -> tuple[Tensor, Tensor]:
    """Compute each row's loss, and if ``write`` its gradient times ``unit`` in the logits' dtype.

    Kernels write that over the logits.
    """
    dtype, vocab, where = logits_RV.dtype, logits_RV.shape[1], logits_RV.device.type
    wide, kernels = torch.promote_types(dtype, torch.float32), _kernels(where, dtype)
    if kernels is not None:
        losses_R = logits_RV.new_empty(len(logits_RV), dtype=wide)
        block = min(kernels.BLOCK, 1 << (vocab - 1).bit_length())
        if not is_fake(logits_RV):  # a fake tensor has no memory
            with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
                kernels.softmax_errors_kernel[(len(losses_R),)](
                    logits_RV, target_R, losses_R, logits_RV.stride(0), ignore_index, unit, vocab,
                    write, block, **kernels.LAUNCH,
                )  # fmt: skip
        return losses_R, logits_RV
    if dtype == torch.bfloat16 and where == "cpu" and may_run():
        losses_of = softmax_errors_ if write else cross_entropy
        return losses_of(logits_RV, target_R, ignore_index), logits_RV
    ignored_R1 = (target_R == ignore_index).unsqueeze(1)
    target_R1 = target_R.unsqueeze(1).masked_fill(ignored_R1, 0)
    log_p_RV = torch.log_softmax(logits_RV, dim=1, dtype=wide)
    log_pt_R1 = log_p_RV.gather(1, target_R1)
    if write:
        # p_t - 1 without cancellation for p_t near 1.
        error_RV = log_p_RV.exp_().scatter_(1, target_R1, torch.expm1(log_pt_R1))
        error_RV = error_RV if unit == 1 else error_RV.mul_(unit)
        logits_RV = error_RV.masked_fill_(ignored_R1, 0).to(dtype)
    return -log_pt_R1.masked_fill_(ignored_R1, 0), logits_RV


def _matmul(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias``, in ``out`` unless a mode looks on: simulated products know no ``out``."""
    into = None if torch._C._len_torch_dispatch_stack() else out
    return torch.mm(a, b, out=into) if bias is None else torch.addmm(bias, a, b, out=into)


def _product_(sum_: Tensor, a: Tensor, b: Tensor, beta: int, unit: float) -> None:
    """Set ``sum_`` to ``beta * sum_ + a @ b / unit``, in its dtype; ``beta`` is 0 or 1."""
    if a.dtype == sum_.dtype:
        sum_.addmm_(a, b, beta=beta, alpha=1 / unit)
        return
    if a.device.type == "cuda" and not torch.version.hip:
        # The operator, since torch.addmm's operands become one dtype under 16-bit weights.
        add = torch.ops.aten.addmm.dtype_out
        add(sum_, a, b, sum_.dtype, beta=beta, alpha=1 / unit, out=sum_)
        return
    scale = None
    if a.dtype == torch.float16:  # a power of two keeps every sum of the product below 2^15
        bound = a.float().abs().sum(1).amax().clamp(min=1) * b.abs().amax()
        scale = torch.ldexp(torch.ones_like(bound), 15 - bound.frexp().exponent)
        b = (b * scale).to(b.dtype)
    memory = a.new_empty(min(len(sum_), VOCABULARY_BLOCK), b.shape[1])
    for low in range(0, len(sum_), VOCABULARY_BLOCK):
        part = sum_[low : low + VOCABULARY_BLOCK]
        made = _matmul(a[low : low + VOCABULARY_BLOCK], b, memory[: len(part)])
        made = made if scale is None else made.float() / (scale * unit)
        part.add_(made) if beta else part.copy_(made)


@cache
def _kernels(device_type: str, dtype: torch.dtype) -> ModuleType | None:
    """The kernels for logits on a GPU, or anywhere in Triton's interpreter."""
    fits = device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    unwanted = torch.version.hip or os.environ.get("HALFSTEP_KERNEL") == "torch"
    if not fits or unwanted or dtype == torch.float64:
        return None
    try:
        import halfstep.kernels.softmax_triton as kernels
    except ImportError:
        return None
    return kernels


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.how = inputs
    _, *ctx.gradients = output
    ctx.mark_non_differentiable(*ctx.gradients)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, target)
    ctx.dtypes = (x.dtype, *(None if t is None else gradient_dtype(t) for t in (weight, bias)))


def _backward(run: Any, ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Multiply in fp32 and cast last, so that only the caller's loss scale can cause overflow.

    The first backward gives the gradients away, so that no copy of them is made; a second one
    (``retain_graph=True``) computes them anew.
    """
    if torch.is_grad_enabled():  # only so under create_graph=True, as in torch.func
        raise NotImplementedError(
            "linear_cross_entropy has no second derivative (its gradients are computed in "
            "forward); for create_graph=True and torch.func use F.cross_entropy of the logits"
        )
    if grad_loss is None:  # what came after the loss has no gradient for it
        return (None,) * (len(ctx.how) + 4)
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        _, *gradients = run(*ctx.saved_tensors, *ctx.how)
    made = (
        grad.mul_(grad_loss).to(dtype) if need else None
        for grad, dtype, need in zip(gradients, ctx.dtypes, ctx.how[-3:], strict=True)
    )
    return (*made, *(None for _ in range(len(ctx.how) + 1)))


class _Function(torch.autograd.Function):
    """Computes the loss sum, and its gradients already in forward, while the logits exist."""

    forward = staticmethod(_compute)
    setup_context = staticmethod(_keep)
    backward = staticmethod(partial(_backward, _compute))


_operator = torch.library.custom_op(
    "halfstep::linear_cross_entropy",
    _compute,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, ScalarType "
    "dtype, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)",
)
_operator.register_fake(_results)
_operator.register_autograd(partial(_backward, _operator), setup_context=_keep)


def _require_targets_in_range(targets_N: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise DataError for a target out of range, and show it; the host waits for the targets."""
    bad_N = ((targets_N < 0) | (targets_N >= vocab)) & (targets_N != ignore_index)
    if not bool(bad_N.any()):
        return
    row = int(bad_N.nonzero()[0, 0])
    raise DataError(
        f"target {int(targets_N[row])} at row {row} is out of range: allowed are 0 to {vocab - 1}, "
        f"or {ignore_index} for a token that does not count. Check that the tokenizer's vocabulary "
        "is the model's vocab_size."
    )


def matmul_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which ``x @ weight.T`` must run to honour the caller's autocast.

    Under autocast that is autocast's dtype for the device of ``x`` (except for fp64, which autocast
    does not touch either); otherwise it is the smallest dtype that holds both operands exactly.
    """
    promoted = torch.promote_types(x.dtype, weight.dtype)
    device = x.device.type
    # is_autocast_enabled raises on device types without autocast, such as "meta"
    on = device in WITH_AUTOCAST and torch.is_autocast_enabled(device)
    if on and promoted != torch.float64:
        return torch.get_autocast_dtype(device)
    return promoted
