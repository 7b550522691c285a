"""Turns a row of logits on a GPU into its loss and, in place, its gradient, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
"""Logits that a program holds at once, 16 in each thread: of 12 sizes the fastest on an H200."""
LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def softmax_errors_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    losses: tl.tensor,
    stride: tl.tensor,
    ignored: tl.tensor,
    unit: tl.tensor,
    columns: tl.constexpr,
    write: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row: its loss, and ``unit * gradient`` in the place of its logits if ``write``.

    Rows begin at multiples of ``stride``, itself a multiple of 16 so that reads are wide; what is
    between them may be anything. The sum over all tokens but the target is kept apart, so that
    1 - p does not cancel. A target out of range makes loss and gradient NaN.

    **Source:** Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", §3.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    skipped = target == ignored
    logits += row * stride
    known = (target >= 0) & (target < columns)
    wanted = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
    most = -3.0e38  # and not -inf: a block may hold nothing but -inf
    others = 0.0
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        z = tl.load(logits + at, mask=at < stride).to(tl.float32)
        z = tl.where(at < columns, z, float("-inf"))
        new = tl.maximum(most, tl.max(z, 0))
        e = tl.where(at == target, 0.0, tl.exp(z - new))
        others = others * tl.exp(most - new) + tl.sum(e, 0)
        most = new
    total = others + tl.exp(wanted - most)
    loss = most - wanted + tl.log(total)
    tl.store(losses + row, tl.where(skipped, 0.0, loss))
    if write:
        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            z = tl.load(logits + at, mask=at < stride).to(tl.float32)
            error = tl.where(at == target, -others, tl.exp(z - most)) * (unit / total)
            error = tl.where(skipped, 0.0, error)
            tl.store(logits + at, error.to(logits.dtype.element_ty), mask=at < stride)
