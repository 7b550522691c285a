"""Number formats in Triton: random bits, bf16 as bits, split masters and moment codes.

These are pure functions of blocks of elements. Each repeats in uint32 what the function of similar
name in precision/masters/rounding.py, weights.py or moments.py does; bf16 is stored as uint16.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ABS = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(0x80000000)
_INF = tl.constexpr(0x7F800000)
_QUIET = tl.constexpr(0x7FC00000)
_LARGEST = tl.constexpr(0x7F6FFFFF)  # this and the next two are as in moments.py
_LOWEST_TOP = tl.constexpr(32)
_BROKEN = tl.constexpr(255)


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """Scramble the bits of a uint32, as ``precision.rounding._mix`` does."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """The bits of fp32 numbers, in uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def from_bits(bits: tl.tensor) -> tl.tensor:
    """The fp32 numbers with these bits, which may be any 32-bit integers."""
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def canonical(x: tl.tensor) -> tl.tensor:
    """The bits of fp32 numbers, with every NaN replaced by the quiet NaN of its sign."""
    b = bits_of(x)
    return tl.where((b & _ABS) > _INF, (b & _SIGN) | _QUIET, b)


@triton.jit
def cut(b: tl.tensor, noise: tl.tensor, low: tl.constexpr) -> tl.tensor:
    """Add ``noise`` to the magnitude and clear the low bits; finite numbers stay finite."""
    magnitude = b & _ABS
    rounded = tl.minimum((magnitude + (noise & low)) & (0xFFFFFFFF - low), _INF - (low + 1))
    return (b & _SIGN) | tl.where(magnitude < _INF, rounded, magnitude)


@triton.jit
def nearest(x: tl.tensor) -> tl.tensor:
    """fp32 rounded to bf16, ties to even, as 16 bits in uint32."""
    b = bits_of(x)
    return tl.where((b & _ABS) > _INF, 0x7FC0, (b + 0x7FFF + ((b >> 16) & 1)) >> 16)


@triton.jit
def kahan_sum(high: tl.tensor, lost: tl.tensor) -> tl.tensor:
    """The fp32 sum of a bf16 weight and residual, as uint32; a weight of -0 keeps its sign."""
    weight = from_bits(high << 16)
    return tl.where((lost & 0x7FFF) == 0, weight, weight + from_bits(lost << 16))


@triton.jit
def kahan(x: tl.tensor):  # noqa: ANN201
    """The nearest bf16 and the rounding error in bf16, as uint32; ``kahan_split`` does it twice."""
    high = nearest(x)
    lost = tl.where((high & 0x7F80) == 0x7F80, 0, nearest(x - from_bits(high << 16)))
    return high, lost


@triton.jit
def joined_master(weight: tl.tensor, remainder: tl.tensor, update: tl.constexpr) -> tl.tensor:
    """The fp32 master of a stored weight and remainder; see ``weights.master``."""
    if update == "fp32":
        return weight
    high = weight.to(tl.uint32) << 16
    if update == "split" or update == "split24":
        low = remainder.to(tl.int32)
        if update == "split24":
            low = low * 256
        # a split never gives a weight of 0 a negative remainder, so here the user has written the 0
        low = tl.where((high & _ABS) == 0, tl.maximum(low, 0), low)
        return from_bits(high + low.to(tl.uint32, bitcast=True))
    if update == "kahan":
        total = kahan_sum(weight.to(tl.uint32), remainder.to(tl.uint32))
        fits = from_bits(nearest(total) << 16) == from_bits(high)
        return tl.where(fits, total, from_bits(high))  # if not, the user wrote the weight
    return from_bits(high)


@triton.jit
def decode_moment(
    codes: tl.tensor, top: tl.tensor, moments: tl.constexpr, signed: tl.constexpr
) -> tl.tensor:
    """The fp32 moments of stored codes; see ``moments.decode``."""
    if moments == "fp32":
        return codes
    if moments == "bf16":
        return from_bits(codes.to(tl.uint32) << 16)
    code = codes.to(tl.uint32)
    levels: tl.constexpr = 127 if signed else 255
    base = ((top.to(tl.uint32) + 1) * 8 - levels)[:, None]
    magnitude = (code & 0x7F) if signed else code
    b = tl.where(magnitude > 0, (magnitude + base) << 20, 0)
    if signed:
        b = b | ((code & 0x80) << 24)
    return from_bits(tl.where((top == _BROKEN)[:, None], _QUIET, b))


@triton.jit
def encode_moment(  # noqa: ANN201
    values: tl.tensor, random: tl.tensor, moments: tl.constexpr, signed: tl.constexpr
):
    """The codes of fp32 moments and, if 8-bit, their block tops; see ``moments.encode``."""
    b = bits_of(values)
    magnitude = tl.minimum(b & _ABS, _LARGEST)
    peak = tl.max((b & _ABS).to(tl.int32), axis=1)
    top = tl.maximum(tl.minimum(peak, _LARGEST) >> 23, _LOWEST_TOP)
    levels: tl.constexpr = 127 if signed else 255
    base = ((top + 1) * 8 - levels)[:, None]
    noise = (random if signed else random >> 12) & 0xFFFFF
    code = ((magnitude + noise) >> 20).to(tl.int32) - base
    lowest = (base + 1) << 20
    if signed:
        kept = noise.to(tl.int32).to(tl.float32) * 9.5367431640625e-07 * from_bits(lowest)
        below = (kept < from_bits(b & _ABS)).to(tl.int32)
        code = tl.where(magnitude.to(tl.int32) < lowest, below, code)
    else:
        code = tl.where(magnitude.to(tl.int32) < lowest, 1, code)
    code = tl.where(magnitude > 0, code, 0)
    if signed:
        code = code | ((b >> 24) & 0x80).to(tl.int32)
    return code.to(tl.uint8), tl.where(peak > _INF, _BROKEN, top).to(tl.uint8)
