"""What rounding to a block format costs a tensor, on some of its rows, bias apart from variance.

Exponents do not tell it: a block's scale follows its largest number. Rows are rounded truly::

    nearest      error = |q - x| / |x|, all of it bias: it is the same in every step
    stochastic   q_1 ... q_K drawn, m their mean, V = sum |q_i - m|^2 / (K - 1)
                 error^2 = bias^2 + spread^2,  spread^2 = V / |x|^2,
                 bias^2 = (|m - x|^2 - V / K) / |x|^2, at least 0

What K draws leave in their mean is taken out of the bias: one draw would make it look useless.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.formats import BlockFormat, block_format
from halfstep.precision.masters.rounding import random_bits

MOST_ROWS, MOST_ELEMENTS = 64, 2**15
_STREAM = 0x10B175


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Relative errors of a tensor's rounding; the root of the sum of squares is the whole.

    Attributes:
        bias: What stays when draws are averaged; of rounding to nearest all.
        spread: What differs from draw to draw; 0 when rounding to nearest.
    """

    bias: float
    spread: float

    @property
    def error(self) -> float:
        """The relative error of one rounding."""
        return math.hypot(self.bias, self.spread)


@torch.no_grad()
def rounding_error(
    x: Tensor, form: BlockFormat | str, *, draws: int = 0, rows: int = MOST_ROWS
) -> RoundingError | None:
    """The relative error of rounding some rows of a tensor to a block format.

    Args:
        x: Any floating tensor; blocks lie along its last dim. The tensor's own largest magnitude
            sets a scale of the whole tensor.
        form: The format, or its name.
        draws: 0 rounds to nearest; from 2 on so many stochastic roundings.
        rows: At most so many are rounded, spread evenly; what fills no whole block is left out.

    Returns:
        None where no block is full, or the rows hold nothing but 0, NaN or infinity.

    Raises:
        PrecisionError: If there is no such format.
    """
    form = block_format(form)
    height, width = form.block or (1, 1)
    if x.ndim == 0 or not x.numel():
        return None
    x = x.detach()
    table = x.reshape(-1, x.shape[-1])
    blocks = len(table) // height
    take = torch.linspace(0, max(blocks - 1, 0), min(blocks, max(rows // height, 1)))
    at = (take.round().long()[:, None] * height + torch.arange(height)).reshape(-1)
    some = table[at.to(x.device), : x.shape[-1] // width * width].float()
    size = float(some.double().norm()) if some.numel() else 0.0
    if not 0 < size < math.inf:
        return None
    amax = None
    if form.block is None or form.rule == "two-level":
        amax = x.abs().amax().float()
        if not bool(amax.isfinite()):
            return None
    if not draws:
        off = form.fake_quantize(some, amax=amax).double() - some
        return RoundingError(float(off.norm()) / size, 0.0)

    def drawn(draw: int) -> Tensor:
        bits = random_bits(draw, 0, some.shape, stream=_STREAM, device=some.device)
        return form.fake_quantize(some, bits=bits, amax=amax).double() - some

    bias, variance = bias_and_variance([drawn(draw)] for draw in range(draws))
    return RoundingError(math.sqrt(bias) / size, math.sqrt(variance) / size)


def bias_and_variance(errors: Iterable[Sequence[Tensor]]) -> tuple[float, float]:
    """The squared mean of errors over draws, and the squares around it; both unbiased.

    Args:
        errors: For each draw, the error in parts. The variance of a single one is 0.

    Returns:
        Sums over all elements, in fp64; NaN or infinite where an error is.
    """
    sums: list[Tensor] = []
    squares, draws = 0.0, 0
    for parts in errors:
        wide = [part.double() for part in parts]
        sums = [total + part for total, part in zip(sums, wide, strict=True)] if sums else wide
        squares += sum(float(part.square().sum()) for part in wide)
        draws += 1
    mean = sum(float((total / draws).square().sum()) for total in sums)
    variance = max((squares - draws * mean) / (draws - 1), 0.0) if draws > 1 else 0.0
    return max(mean - variance / draws, 0.0), variance


def rounding_errors(
    x: Tensor, forms: Sequence[str], *, draws: int = 4
) -> dict[str, tuple[float, float, float]]:
    """For each format: the error to nearest, then bias and spread of stochastic rounding.

    Of wide tensors fewer rows are rounded, as their elements tell as much.
    """
    found = {}
    rows = MOST_ELEMENTS // max(1, x.shape[-1]) if x.ndim else 1
    rows = max(4, min(MOST_ROWS, rows))
    for name in forms:
        nearest = rounding_error(x, name, rows=rows)
        drawn = rounding_error(x, name, draws=draws, rows=rows)
        if nearest is not None and drawn is not None:
            found[name] = (nearest.bias, drawn.bias, drawn.spread)
    return found
