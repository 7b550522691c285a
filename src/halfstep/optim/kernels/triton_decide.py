"""Gradient statistics and the decisions of a step on a GPU, without the host.

In each step, one pass over the gradients gives, per program, a sum of squares in fp64 (which holds
the squares of all finite fp32 gradients, so the sum is not finite only if a gradient is not) and,
per tensor, whether it holds infinities or NaN. One program then adds these sums, in the same order
in every run, and decides everything that the update needs. on_device/buffer.py defines the layout
of the state; the scale's algorithm is that of precision/scaling/loss_scale.py.

The host writes the rule's constants; those that depend on the step number are computed here, in
fp64. AdamW's bias corrections can differ from the host's by a relative
n * beta^n / (1 - beta^n) * 2^-51 after n steps, since powers are computed by squaring, not ``pow``.
For beta = 0.999 this is below 2^-40: about one step in 10^5 has another last bit in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.optim.kernels.triton_numbers import from_bits
from halfstep.optim.kernels.triton_update import (
    COLUMNS,
    COUNT,
    GRADIENT,
    LAUNCH,
    STATISTICS_START,
    load,
    pointer,
    update_kernel,
)
from halfstep.optim.on_device.buffer import Head, Row

__all__ = ["LAUNCH", "decide_kernel", "statistics_kernel", "update_kernel"]

_ABS = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest finite fp32 number
_SCALE = tl.constexpr(Head.SCALE.value)
_GOOD_STEPS = tl.constexpr(Head.GOOD_STEPS.value)
_HYSTERESIS_LEFT = tl.constexpr(Head.HYSTERESIS_LEFT.value)
_NORM = tl.constexpr(Head.NORM.value)
_LOSS = tl.constexpr(Head.LOSS.value)
_FOUND = tl.constexpr(Head.FOUND.value)
_MULTIPLIER = tl.constexpr(Head.MULTIPLIER.value)
_DYNAMIC = tl.constexpr(Head.DYNAMIC.value)
_GROWTH_FACTOR = tl.constexpr(Head.GROWTH_FACTOR.value)
_BACKOFF_FACTOR = tl.constexpr(Head.BACKOFF_FACTOR.value)
_GROWTH_INTERVAL = tl.constexpr(Head.GROWTH_INTERVAL.value)
_MIN_SCALE = tl.constexpr(Head.MIN_SCALE.value)
_MAX_SCALE = tl.constexpr(Head.MAX_SCALE.value)
_HYSTERESIS = tl.constexpr(Head.HYSTERESIS.value)
_ROWS = tl.constexpr(Head.SIZE.value)
_ROW = tl.constexpr(Row.SIZE.value)
_STEP = tl.constexpr(Row.STEP.value)
_CONSTANTS = tl.constexpr(Row.CONSTANTS.value)


@triton.jit
def _sums(  # noqa: ANN202
    address, start, count, total, wrong,  # noqa: ANN001
    dtype: tl.constexpr, masked: tl.constexpr, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Add the squares and flags of ``tile * tiles`` gradients to each lane's totals."""
    at = tl.arange(0, tile)
    address += start
    count = tl.minimum(count - start, tile * tiles).to(tl.int32)
    done = 0
    while done < count:
        for _ in tl.static_range(4):  # unrolled, so that four loads are in flight at once
            g = load(address, at, count, masked)
            g = from_bits(g.to(tl.uint32) << 16) if dtype == "bf16" else g.to(tl.float32)
            magnitude = g.to(tl.uint32, bitcast=True) & _ABS
            wrong |= tl.where(magnitude == _INF, 1, 0) | tl.where(magnitude > _INF, 2, 0)
            total += g.to(tl.float64) * g.to(tl.float64)
            at += tile
        done += 4 * tile
    return total, wrong


@triton.jit(do_not_specialize=["first"])
def statistics_kernel(
    table: tl.tensor,
    owners: tl.tensor,
    partials: tl.tensor,
    flags: tl.tensor,
    first: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """Write the sum of squares of ``tile * tiles`` gradients to ``partials``, and set ``flags``.

    Bit 0 of a tensor's flag is set if it holds an infinity, bit 1 if it holds a NaN.
    """
    program = tl.program_id(0)
    task = tl.load(owners + program)
    row = table + task * COLUMNS
    count = tl.load(row + COUNT)
    wide: tl.constexpr = tl.float32 if dtype == "fp32" else tl.float16
    stored: tl.constexpr = tl.uint16 if dtype == "bf16" else wide
    address = pointer(row, GRADIENT, stored, aligned)
    start = (program - tl.load(row + STATISTICS_START)) * (tile * tiles)
    total = tl.zeros([tile], tl.float64)
    wrong = tl.zeros([tile], tl.int32)
    if start + tile * tiles <= count:
        total, wrong = _sums(address, start, count, total, wrong, dtype, False, tile, tiles)
    else:
        total, wrong = _sums(address, start, count, total, wrong, dtype, True, tile, tiles)
    tl.store(partials + first + program, tl.sum(total))
    flag = tl.max(wrong & 1) | tl.max(wrong & 2)
    tl.atomic_or(flags + task, flag, mask=flag != 0)


@triton.jit
def _power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """fp64 base to an integer power below 2^31, by squaring; relative error < exponent * 2^-52."""
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(31):
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit(
    do_not_specialize=["max_norm", "partial_count", "flag_count", "row_count"],
    do_not_specialize_on_alignment=["loss"],
)
def decide_kernel(  # noqa: PLR0915  # one program: what it decides stays on the device
    state: tl.tensor,
    partials: tl.tensor,
    flags: tl.tensor,
    loss: tl.tensor,
    max_norm: tl.tensor,
    partial_count: tl.tensor,
    flag_count: tl.tensor,
    row_count: tl.tensor,
    rule: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    """Decide on the step, in one program.

    ``loss`` points to an fp32 number, and ``max_norm`` is the bits of an fp64 one (Triton passes
    floats in fp32). ``rows`` is a power of two, at least ``row_count``.
    """
    lanes = tl.arange(0, tile)
    squares = tl.zeros([tile], tl.float64)
    at = 0
    while at < partial_count:  # Triton's interpreter has no range up to an argument
        squares += tl.load(partials + at + lanes, mask=at + lanes < partial_count, other=0.0)
        at += tile
    wrong = tl.zeros([tile], tl.int32)
    at = 0
    while at < flag_count:
        wrong |= tl.load(flags + at + lanes, mask=at + lanes < flag_count, other=0)
        at += tile
    overflow = tl.max(wrong) > 0
    total = tl.load(loss).to(tl.float64)
    lost = (tl.abs(total) > _LARGEST) | (total != total)
    found = overflow | lost

    scale = tl.load(state + _SCALE)
    good = tl.load(state + _GOOD_STEPS)
    left = tl.load(state + _HYSTERESIS_LEFT)
    low = tl.load(state + _MIN_SCALE)
    norm = tl.sqrt(tl.sum(squares))
    tiny = tl.full([], 1e-6, tl.float64)
    clip = tl.minimum(max_norm.to(tl.int64).to(tl.float64, bitcast=True) / (norm + tiny), 1.0)

    left_skip = left - 1
    smaller = tl.maximum(scale * tl.load(state + _BACKOFF_FACTOR), low)
    scale_skip = tl.where(left_skip <= 0, smaller, scale)
    grows = good + 1 == tl.load(state + _GROWTH_INTERVAL)
    larger = tl.minimum(scale * tl.load(state + _GROWTH_FACTOR), tl.load(state + _MAX_SCALE))
    left_good = tl.where(grows, tl.load(state + _HYSTERESIS), left)
    # a loss that is not finite itself says nothing about the scale
    adapts = tl.where(lost, 0.0, tl.load(state + _DYNAMIC)) > 0
    new_scale = tl.where(overflow, scale_skip, tl.where(grows, larger, scale))
    new_good = tl.where(overflow | grows, 0.0, good + 1)
    new_left = tl.where(overflow, left_skip, left_good)

    order = tl.arange(0, rows)
    held = order < row_count
    row = state + _ROWS + order * _ROW
    n = tl.load(row + _STEP, mask=held, other=0.0) + 1

    tl.debug_barrier()  # every warp must have read what the stores below overwrite
    tl.store(state + _SCALE, tl.where(adapts, new_scale, scale))
    tl.store(state + _GOOD_STEPS, tl.where(adapts, new_good, good))
    tl.store(state + _HYSTERESIS_LEFT, tl.where(adapts, new_left, left))
    tl.store(state + _NORM, norm)
    tl.store(state + _LOSS, total)
    tl.store(state + _FOUND, found.to(tl.float64))
    tl.store(state + _MULTIPLIER, clip)

    held = order < tl.where(found, 0, row_count)
    tl.store(row + _STEP, n, mask=held)
    beta1 = tl.load(row, mask=held, other=0.0)
    beta2 = tl.load(row + 2, mask=held, other=0.0)
    for i in tl.static_range(8):  # the same as Algorithm.at_step in rules.py
        c = tl.load(row + i, mask=held, other=0.0)
        if rule == "adamw":
            if i == 5:
                c = c / (1 - _power(beta1, n.to(tl.int32)))
            if i == 6:
                c = 1 / tl.sqrt(1 - _power(beta2, n.to(tl.int32)))
        if rule == "sgd" and i < 2:
            c = tl.where(n > 1, c, 1.0 if i == 1 else 0.0)
        tl.store(row + _CONSTANTS + i, c, mask=held)
