"""One pass over the gradients of a step on a GPU: sums of squares, and which are not finite.

Sums are fp64, which holds the squares of all finite fp32 gradients, so a sum is not finite only if
a gradient is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.optim.kernels.triton_numbers import from_bits
from halfstep.optim.kernels.triton_update import LAUNCH, load, pointer, update_kernel

__all__ = ["LAUNCH", "statistics_kernel", "update_kernel"]

# Columns of a row of the table: address, number of elements, index of the first program.
ADDRESS = tl.constexpr(0)
COUNT = tl.constexpr(1)
START = tl.constexpr(2)
COLUMNS = tl.constexpr(3)
_ABS = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)


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


@triton.jit
def statistics_kernel(
    table: tl.tensor,
    owners: tl.tensor,
    partials: tl.tensor,
    flags: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """Write the sum of squares of ``tile * tiles`` elements of one gradient, and set its flag.

    Bit 0 of a gradient's flag is set if it holds an infinity, bit 1 if it holds a NaN. ``owners``
    gives the row of each program.
    """
    program = tl.program_id(0)
    task = tl.load(owners + program)
    row = table + task * COLUMNS
    count = tl.load(row + COUNT)
    wide: tl.constexpr = tl.float32 if dtype == "fp32" else tl.float16
    stored: tl.constexpr = tl.uint16 if dtype == "bf16" else wide
    address = pointer(row, ADDRESS, stored, aligned)
    start = (program - tl.load(row + START)) * (tile * tiles)
    total = tl.zeros([tile], tl.float64)
    wrong = tl.zeros([tile], tl.int32)
    if start + tile * tiles <= count:
        total, wrong = _sums(address, start, count, total, wrong, dtype, False, tile, tiles)
    else:
        total, wrong = _sums(address, start, count, total, wrong, dtype, True, tile, tiles)
    tl.store(partials + program, tl.sum(total))
    flag = tl.max(wrong & 1) | tl.max(wrong & 2)
    tl.atomic_or(flags + task, flag, mask=flag != 0)
