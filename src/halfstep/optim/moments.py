"""8-bit moments: floating-point codes whose window of exponents follows each block's largest value.

An 8-bit code cannot span the range of a second moment, but a window of 32 binades is enough for
most blocks of 128 neighbours. A code holds 3 mantissa bits and the exponent within the window; the
window's top is the largest exponent of the block, stored in one byte per block::

    t     = (bits(|x|) + r) >> 20            exponent and 3 mantissa bits, r: 20 random bits
    code  = t - base                         code 0 means 0
    base  = 8 * (top + 1) - codes            codes: 255, or 127 with a sign

The representable values do not depend on the window, so moving it never rounds again. Rounding is
stochastic, since with nearest rounding an exponential average cannot decay: at beta2 = 0.999 a step
changes v by at most 0.1 %, less than half of any 8-bit gap, so a v that should fall stays as it
is (measured: the root 35 % too large after the gradients of half a block shrank tenfold; 1 % here).

A nonzero second moment is never rounded to 0, since the update divides by its root. A block with a
NaN has the top 255 and decodes to NaN throughout, so that the NaN is noticed; infinity becomes the
largest number.

**Source:** block-wise 8-bit states: Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022 (there with nearest rounding and a table); stochastic rounding as in
:mod:`halfstep.precision.masters.rounding`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from halfstep.precision.masters.rounding import round_stochastic

Moments = Literal["fp32", "bf16", "8bit"]
DTYPES: dict[Moments, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8
}  # fmt: skip
"""Format of moments to the dtype that stores them."""
FORMATS = {dtype: moments for moments, dtype in DTYPES.items()}
"""The dtype of stored moments to their format."""
BLOCK = 128
_DROPPED = 20  # of the 23 mantissa bits
BROKEN = 255
_LOWEST_TOP = 32  # so that no window reaches down to the subnormal numbers
_LARGEST = 0x7F6FFFFF  # rounds up to the largest number of 3 mantissa bits, not to infinity


def zeros(like: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """A moment of zeros for a parameter.

    Returns:
        The moment, with the parameter's shape and strides; and the block tops, uint8 of shape
        (ceil(numel / 128),), with 0 elements unless ``moments`` is ``"8bit"``.
    """
    blocks = -(-like.numel() // BLOCK) if moments == "8bit" else 0
    values = torch.zeros_like(like, dtype=DTYPES[moments])
    return values, torch.full((blocks,), _LOWEST_TOP, dtype=torch.uint8, device=like.device)


def encode(
    values: Tensor, moments: Moments, random: Tensor | None, *, signed: bool, again: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Encode fp32 moments in a format, with stochastic rounding.

    Args:
        values: fp32, shape (n,); finite, and not negative unless ``signed``.
        moments: The format.
        random: int32 random bits, shape (n,); None for fp32. The first moment uses the low 20 bits
            of each, the second the high 20.
        signed: True for a first moment, False for a second.
        again: Take the lowest window that holds each block's largest value; then numbers that were
            decoded are encoded as the same numbers.

    Returns:
        Codes (n,) in the format's dtype, and the blocks' tops or None.
    """
    if moments == "fp32":
        return values, None
    assert random is not None
    noise = random & 0xFFFFF if signed else (random >> 12) & 0xFFFFF
    if moments == "bf16":
        return round_stochastic(values, noise), None
    magnitude = (values.view(torch.int32) & 0x7FFFFFFF).clamp(max=_LARGEST)
    n, blocks = values.numel(), -(-values.numel() // BLOCK)
    padded = torch.nn.functional.pad(magnitude, (0, blocks * BLOCK - n)).view(blocks, BLOCK)
    # A power of two may have been rounded up to, from a window below its own.
    top = ((padded.amax(1) - int(again)) >> 23).clamp(min=_LOWEST_TOP)
    nan = torch.nn.functional.pad(values.isnan(), (0, blocks * BLOCK - n))
    broken = nan.view(blocks, BLOCK).any(1)
    base = _per_element((top + 1) * 8 - (127 if signed else 255), n)
    code = ((magnitude + noise) >> _DROPPED) - base
    lowest = (base + 1) << _DROPPED
    below = torch.ones_like(code)
    if signed:  # below the window: the smallest code with probability |x| / lowest, else 0
        kept = noise.float() * 2.0**-_DROPPED * lowest.view(torch.float32) < values.abs()
        below = kept.to(torch.int32)
    code = torch.where(magnitude < lowest, below, code)
    code = torch.where(magnitude > 0, code, 0)
    if signed:
        code = code | ((values.view(torch.int32) >> 24) & 0x80)
    return code.to(torch.uint8), torch.where(broken, BROKEN, top).to(torch.uint8)


def decode(codes: Tensor, tops: Tensor | None, *, signed: bool) -> Tensor:
    """The fp32 moments that :func:`encode` stored; uint8 codes need their block ``tops``."""
    if codes.dtype != torch.uint8:
        return codes.float()
    assert tops is not None
    tops = _per_element(tops, codes.numel())
    base = (tops.to(torch.int32) + 1) * 8 - (127 if signed else 255)
    code = codes.to(torch.int32)
    magnitude = code & 0x7F if signed else code
    bits = torch.where(magnitude > 0, (magnitude + base) << _DROPPED, 0)
    if signed:
        bits = bits | (code & 0x80) << 24
    return torch.where(tops == BROKEN, math.nan, bits.view(torch.float32))


def _per_element(blocks: Tensor, count: int) -> Tensor:
    return blocks.repeat_interleave(BLOCK)[:count]
