"""Fuses the head matmul and the softmax cross-entropy, so that all logits never exist at once.

Logits are the largest tensor of a language model: 8192 tokens of GPT-2 make 1.6 GB of them in fp32,
and autograd keeps them until their gradient is done. Here they exist for one chunk of rows at a
time: a chunk goes from logits to loss to gradients before the next begins, and backward only
multiplies finished gradients by the incoming scalar, in place. bf16 logits on a CPU become their
own gradients in place, by a compiled kernel. ``docs/decisions/0002-loss-head.md`` gives the
reasons, the alternatives and their measured times.

Shapes: N tokens, R tokens of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from halfstep.errors import DataError
from halfstep.kernels.rows import cross_entropy, gradient_dtype, softmax_errors_
from halfstep.precision.casting.cast import WITH_AUTOCAST
from halfstep.precision.casting.op_casts import may_run

IGNORE_INDEX = -100
"""Target of a token that is not counted. **Source:** default of ``torch.nn.CrossEntropyLoss``."""

CHUNK_BYTES = 128 * 2**20
"""Maximal size of one chunk's fp32 logits in bytes. **Source:** table 2 of docs/decisions/0002."""

MIN_ROWS = 16
"""Minimal rows of a chunk, so that a huge vocabulary does not reduce the matmul to dot products."""

MAX_ROWS_ON_CPU = 512
"""Maximal rows of a chunk on CPU: larger chunks gain little or are slower.

**Source:** table 2 of docs/decisions/0002: 512 is near the fastest for V = 8192 (16 MiB of logits)
and V = 50257 (98 MiB) alike.
"""

IN_PLACE_BYTES = 32 * 2**20
"""Maximal size of a chunk of bf16 logits that become their gradients in place.

**Source:** table 3 of docs/decisions/0002.
"""

VOCABULARY_BLOCK = 4096
"""How many rows of the weight get their gradient in one product there."""


def linear_cross_entropy_sum(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Sum ``-log softmax(x W^T)[target]`` over the counted tokens in fp32, and count them.

    The matmuls run in autocast's dtype where autocast is on, else in the wider dtype of ``x_ND``
    and ``weight_VD``; all else is fp32 (fp64 for fp64 operands). The host never waits.

    Args:
        x_ND: Final hidden states.
        weight_VD: Head weight, which is the embedding table if tied.
        targets_N: int64, each in ``[0, V)``, or -100: such a token does not count.
        chunk_bytes: Maximal bytes of one chunk's fp32 logits; peak memory is up to 2.5 times that.

    Returns:
        The loss sum in nats, an fp32 scalar with gradient, and the count, an int64 scalar.

    **Source:** with z = W x, l = logsumexp(z) - z_t and dl/dz = softmax(z) - onehot(t).
    """
    if targets_N.dtype != torch.int64:
        raise DataError(
            f"targets are {targets_N.dtype}; allowed: torch.int64, which targets.long() makes"
        )
    vocab, device_type = weight_VD.shape[0], x_ND.device.type
    dtype = matmul_dtype(x_ND, weight_VD)
    grad_is_on = torch.is_grad_enabled()
    try:
        with autocast_off(device_type):
            loss_sum = _LinearCrossEntropySum.apply(  # type: ignore[no-untyped-call]
                x_ND,
                weight_VD,
                targets_N,
                rows_per_chunk(vocab, device_type, chunk_bytes),
                dtype,
                grad_is_on and x_ND.requires_grad,
                grad_is_on and weight_VD.requires_grad,
            )
    except RuntimeError:
        if device_type == "cpu":  # torch's "index out of bounds" does not show the target
            _require_targets_in_range(targets_N, vocab)
        raise
    return cast(Tensor, loss_sum), (targets_N != IGNORE_INDEX).sum()


def rows_per_chunk(vocab: int, device_type: str, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of tokens in one chunk of fp32 logits of ``vocab`` columns."""
    rows = max(MIN_ROWS, chunk_bytes // (4 * vocab))
    return min(rows, MAX_ROWS_ON_CPU) if device_type == "cpu" else rows


class _LinearCrossEntropySum(torch.autograd.Function):
    """Computes the loss sum, and its gradients already in forward, while the logits exist."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, *how: Any) -> Tensor:
        """Compute the loss and both gradients chunk by chunk; autocast must be off."""
        loss_sum, *gradients = _sum_and_gradients(x_ND, weight_VD, *how)
        ctx.save_for_backward(x_ND, weight_VD)
        ctx.how, ctx.gradients = how, gradients
        ctx.dtypes = (x_ND.dtype, gradient_dtype(weight_VD))
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply in fp32 and cast last, so that only the caller's loss scale can cause overflow.

        The first backward gives the gradients away, so that no copy of them is made; a second one
        (``retain_graph=True``) computes them anew.
        """
        if torch.is_grad_enabled():  # only so under create_graph=True
            raise NotImplementedError(
                "linear_cross_entropy_sum has no second derivative (its gradients are computed in "
                "forward); for create_graph=True use cross_entropy of the model's logits"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            with autocast_off(grad_loss.device.type):
                _, *gradients = _sum_and_gradients(*ctx.saved_tensors, *ctx.how)
        made = [
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*made, *(None for _ in ctx.how))


def _sum_and_gradients(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    rows: int,
    dtype: torch.dtype,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the loss sum and its gradients of hidden states and weight, in fp32 at least."""
    xs_ND, weight = x_ND.to(dtype), weight_VD.to(dtype)  # once, not once per chunk
    counted_N1 = (targets_N != IGNORE_INDEX).unsqueeze(1)
    xs_ND = xs_ND.masked_fill(~counted_N1, 0)  # of anything; and 0 times NaN were no 0 below
    on_cpu = x_ND.device.type == "cpu" and x_ND.numel() > 0
    if on_cpu and dtype == torch.bfloat16 and may_run():
        return _by_kernel(xs_ND, weight, targets_N, rows, need_x, need_weight)
    accumulate = torch.promote_types(dtype, torch.float32)  # fp64 stays fp64
    # Compute ignored rows as if their target were 0, and mask their results.
    safe_N1 = targets_N.unsqueeze(1).masked_fill(~counted_N1, 0)
    loss_sum = torch.zeros((), dtype=accumulate, device=x_ND.device)
    grad_x_ND = torch.empty_like(xs_ND, dtype=accumulate) if need_x else None
    grad_w_VD = torch.zeros_like(weight, dtype=accumulate) if need_weight else None
    if dtype == torch.float16:
        x_max, w_max = _largest(xs_ND), _largest(weight)
    for start in range(0, xs_ND.shape[0], rows):
        here = slice(start, start + rows)
        x_RD, target_R1, counted_R1 = xs_ND[here], safe_N1[here], counted_N1[here]
        # From here to the cast below, one chunk of logits is in fp32.
        logits_RV = torch.mm(x_RD, weight.t())
        log_p_RV = torch.log_softmax(logits_RV, dim=1, dtype=accumulate)
        log_pt_R1 = log_p_RV.gather(1, target_R1)
        loss_sum -= log_pt_R1.masked_fill(~counted_R1, 0).sum()
        if not (need_x or need_weight):
            continue
        error_RV = log_p_RV.exp_()
        # p_t - 1 without cancellation for p_t near 1.
        error_RV.scatter_(1, target_R1, torch.expm1(log_pt_R1))
        s, r = None, None
        if dtype == torch.float16:
            s, r = _fp16_scales(log_pt_R1, x_max, w_max)
            error_RV.mul_(s)
            x_RD = (x_RD.float() * (r / s)).to(dtype)
        error_RV = error_RV.to(dtype)
        if grad_x_ND is not None:
            grad_RD = torch.mm(error_RV, weight).to(accumulate)
            grad_RD = grad_RD if s is None else grad_RD.div_(s)
            grad_x_ND[here] = grad_RD.masked_fill_(~counted_R1, 0)
        if grad_w_VD is not None:
            _add_product_(grad_w_VD, error_RV.t(), x_RD, r)
    return loss_sum, grad_x_ND, grad_w_VD


def _add_product_(sum_VD: Tensor, error_VR: Tensor, x_RD: Tensor, r: Tensor | None) -> None:
    """Add the matmul of two operands, divided by ``r`` if given, in the sum's dtype."""
    if sum_VD.dtype == x_RD.dtype:
        sum_VD.addmm_(error_VR, x_RD)
    else:
        part_VD = torch.mm(error_VR, x_RD)
        sum_VD += part_VD if r is None else part_VD.float().div_(r)


def _by_kernel(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    rows: int,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What :func:`_sum_and_gradients` computes, of bf16 operands on a CPU.

    One buffer holds a chunk's logits, then its errors. The weight's gradient is multiplied a block
    of the vocabulary at a time, so that beside the sum itself only a block of it exists.
    """
    vocab = len(weight_VD)
    rows = min(len(x_ND), max(MIN_ROWS, min(rows, IN_PLACE_BYTES // (2 * vocab))))
    rows = -(-len(x_ND) // -(-len(x_ND) // rows))  # the same number in every chunk
    _require_targets_in_range(targets_N, vocab)
    logits = x_ND.new_empty(rows, vocab)
    loss_sum = x_ND.new_zeros((), dtype=torch.float32)
    grad_x_ND = x_ND.new_empty(x_ND.shape, dtype=torch.float32) if need_x else None
    grad_w_VD = x_ND.new_empty(weight_VD.shape, dtype=torch.float32) if need_weight else None
    block = x_ND.new_empty(min(vocab, VOCABULARY_BLOCK), x_ND.shape[1])
    for start in range(0, len(x_ND), rows):
        x_RD = x_ND[start : start + rows]
        error_RV = torch.mm(x_RD, weight_VD.t(), out=logits[: len(x_RD)])
        losses_of = softmax_errors_ if need_x or need_weight else cross_entropy
        loss_sum += losses_of(error_RV, targets_N[start : start + rows], IGNORE_INDEX).sum()
        if grad_x_ND is not None:
            grad_x_ND[start : start + rows] = torch.mm(error_RV, weight_VD)
        if grad_w_VD is not None:
            for low in range(0, vocab, len(block)):
                part = slice(low, low + len(block))
                sum_VD = grad_w_VD[part]
                part_VD = torch.mm(error_RV.t()[part], x_RD, out=block[: len(sum_VD)])
                sum_VD.add_(part_VD) if start else sum_VD.copy_(part_VD)
    return loss_sum, grad_x_ND, grad_w_VD


def _require_targets_in_range(targets_N: Tensor, vocab: int) -> None:
    """Raise DataError for a target out of range, and show it; the host waits for the targets."""
    if is_fake(targets_N):  # an estimate of memory knows shapes alone
        return
    bad_N = ((targets_N < 0) | (targets_N >= vocab)) & (targets_N != IGNORE_INDEX)
    if not bool(bad_N.any()):
        return
    row = int(bad_N.nonzero()[0, 0])
    raise DataError(
        f"target {int(targets_N[row])} at row {row} is out of range: allowed are 0 to {vocab - 1}, "
        f"or {IGNORE_INDEX} for a token that does not count. Check that the tokenizer's vocabulary "
        "is the model's vocab_size."
    )


# Scaling that keeps the loss head's gradient matmuls inside the narrow range of fp16.
#
# Shapes: R tokens of one chunk, D model width, V vocabulary.


_SMALLEST = 2.0**-20
"""Floor for miss and max|X|: avoids division by 0; anything smaller is fp32 rounding noise."""


def _fp16_scales(log_pt_R1: Tensor, x_max: Tensor, w_max: Tensor) -> tuple[Tensor, Tensor]:
    """Compute powers of two that keep both gradient matmuls of a chunk inside the range of fp16.

    The caller's loss scale is not known in forward, so each chunk uses scales of its own and
    divides by them again in fp32, which is exact. With E = softmax - onehot, miss_n = 1 - p_nt::

        s = power of two below 2^12 / (max_n miss_n * max(1, 2 max|W|))
        r = power of two below 2^15 / (sum_n miss_n * max|X|)
        E' = s E          dX = (E' W) / s
        X' = (r / s) X    dW = (E'^T X') / r

    Nothing overflows. A row of E holds -miss_n, and positive numbers that sum to miss_n, so
    |E'| <= 2^12 and |E' W| <= 2 s miss_n max|W| <= 2^12. A column of E adds up to no more than
    sum_n miss_n in absolute value, so |E'^T X'| <= 2^15. And little underflows: the scales follow
    the confidence of the model, so a chunk whose every p_nt is 0.9999 uses as many binades as one
    that guesses. Unscaled, E would lose all probabilities below 2^-25, and dW the rare tokens.

    ``x_max`` is over all chunks.

    **Source:** derived here. 2^15 is half of the largest fp16 number (65504), which leaves a factor
    of two for the rounding of the bounds themselves. 2^12 instead of 2^15 for s gives X' three more
    binades, because sum_n miss_n may be R times max_n miss_n.
    """
    miss_R1 = torch.expm1(log_pt_R1).neg_().clamp_(min=_SMALLEST)
    s = _power_of_two_below(2.0**12 / (miss_R1.amax() * (2 * w_max).clamp(min=1)))
    return s, _power_of_two_below(2.0**15 / (miss_R1.sum() * x_max.clamp(min=_SMALLEST)))


def _largest(t: Tensor) -> Tensor:
    """Return the largest magnitude in ``t`` as an fp32 scalar on its device; 0 if it is empty."""
    if t.numel() == 0:
        return torch.zeros((), device=t.device)
    low, high = torch.aminmax(t)
    return torch.maximum(low.abs(), high.abs()).float()


def _power_of_two_below(t: Tensor) -> Tensor:
    """Round ``t > 0`` down to a power of two; exact, as t = m 2^k with m in [0.5, 1)."""
    return t / (2 * torch.frexp(t).mantissa)


# Excludes chosen operations from autocast, alike on every device type.
#
# Autocast decides per device which operations run in 16 bits: CUDA's list sends ``layer_norm`` to
# fp32, CPU's list does not. A model that relies on the list computes different values on the two.
# Autocast is therefore switched off around the operations whose dtype matters (norm statistics,
# logits, loss), and these choose their dtype themselves.


def _autocast_is_on(device_type: str) -> bool:
    # is_autocast_enabled raises on device types without autocast, such as "meta"
    return device_type in WITH_AUTOCAST and torch.is_autocast_enabled(device_type)


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Return a context that switches autocast off; free if it is off already."""
    if _autocast_is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def matmul_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which ``x @ weight.T`` must run to honour the caller's autocast.

    Under autocast that is autocast's dtype for the device of ``x`` (except for fp64, which autocast
    does not touch either); otherwise it is the smallest dtype that holds both operands exactly.
    """
    promoted = torch.promote_types(x.dtype, weight.dtype)
    if promoted != torch.float64 and _autocast_is_on(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return promoted
