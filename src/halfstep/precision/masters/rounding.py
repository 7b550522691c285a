"""Rounding modes that lose no update, or none on average: split masters, stochastic, Kahan.

:data:`ROUNDING` at the end is the table of rounding modes, from which everything else derives.

Split masters: the bf16 weight is the upper half of an fp32 master, rounded to nearest; the rest is
the signed distance from the weight to the master, which always fits in 16 bits::

    b = bits of the fp32 master, a 32-bit integer
    weight    = (b + 0x8000) >> 16          the upper half, rounded (ties away from zero)
    remainder = int16(b)                    the lower half, read as a signed number
    b         = (weight << 16) + remainder  modulo 2^32: exact for every number and infinity

Finite masters above the largest bf16 have an infinite weight, as rounding to nearest demands, and a
negative remainder, which keeps the master. NaN becomes the quiet NaN of its sign.

With 24 bits the remainder is 8 bits wide and the lowest byte of the master is rounded away. With
nearest rounding, updates below 2^-17 of the weight would be lost; a random byte added before the
low byte is cut off makes the rounding right on average.

The random bits are a pure function of (seed, step, stream, index), so a resume, a replay and two
ranks draw the same ones.

**Source:** the signed 16-bit remainder as in NVIDIA Apex and TransformerEngine
(``store_param_remainders``); stochastic rounding: Gupta et al., "Deep Learning with Limited
Numerical Precision", ICML 2015, section 3; Kahan, "Further remarks on reducing truncation errors",
CACM 8(1), 1965; the integer hash is ``lowbias32`` of Wellons' hash-prospector (public domain).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Update = Literal["nearest", "split", "split24", "kahan", "stochastic"]
"""The names of the rounding modes."""

REMAINDER = "remainder"
"""The key of what is stored beside a weight, in an optimizer's state."""
_MASK = 0xFFFFFFFF
_ABS = 0x7FFFFFFF
_INF = 0x7F800000
_QUIET = 0x7FC00000


def _mix(x: Any) -> Any:
    """A bijection of 32-bit integers; tensors hold them as int64, whose overflow is masked off."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK
    x = x ^ x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def random_key(seed: int, step: int, stream: int) -> int:
    """The 32-bit key of one tensor's random bits in one step."""
    key: int = _mix(_mix(_mix(seed & _MASK) ^ step & _MASK) ^ stream & _MASK)
    return key


def random_bits(
    seed: int,
    step: int,
    shape: int | Sequence[int],
    *,
    stream: int = 0,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """32 random bits per element, int32 of ``shape``; the same on every device.

    Of ``seed`` the low 32 bits count, ``stream`` differs between tensors of one step, and ``start``
    is the first element's index: so a slice draws the same bits as in its tensor.
    """
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    numbers = torch.arange(start, start + size.numel(), device=device)
    return bits_of(numbers, random_key(seed, step, stream)).reshape(size)


def bits_of(numbers: Tensor, key: int | Tensor) -> Tensor:
    """The random bits, int32, of elements by their numbers (int64) and :func:`random_key`."""
    x: Tensor = _mix((numbers ^ key) & _MASK)
    return (x - ((x & 0x80000000) << 1)).to(torch.int32)  # the same 32 bits


def _canonical_bits(master: Tensor) -> Tensor:
    """The bits of fp32 numbers in int32, with every NaN replaced by the quiet NaN of its sign."""
    bits = master.view(torch.int32)
    # A sum is the fastest test for a NaN (infinities may give one too, which does no harm). On
    # other devices the test would make the host wait.
    if bits.device.type == "cpu" and not math.isnan(float(master.sum())):
        return bits
    return torch.where(master.isnan(), bits & ~_ABS | _QUIET, bits)


def _bf16_of(high: Tensor) -> Tensor:
    """The bf16 numbers whose bits are the low 16 of ``high``."""
    return high.to(torch.int16).view(torch.bfloat16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split contiguous fp32 into the nearest bf16 and the int16 remainder, of the same shape."""
    bits = _canonical_bits(master)
    # int16 reads the lower half as signed; + 0x8000 rounds the upper half accordingly.
    return _bf16_of((bits + 0x8000).bitwise_right_shift_(16)), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder; the inverse of :func:`split`.

    If the weight was written since the split, the result is the written value to within half a
    gap: with any remainder, rounding gives the weight back. With a weight of 0, a negative
    remainder, which :func:`split` never makes, would give a NaN; there it counts as 0.
    """
    return _joined(weight, remainder.to(torch.int32))


def split24(master: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Split contiguous fp32 into bf16 and an int8 remainder, by the low 8 of int32 random bits.

    :func:`join24` gives a number with 15 stored mantissa bits whose expectation is the master.
    """
    cut = _cut(master, bits, 0xFF) >> 8  # 24 bits with the sign
    low = cut << 24 >> 24
    return _bf16_of((cut - low) >> 8), low.to(torch.int8)


def join24(weight: Tensor, remainder: Tensor) -> Tensor:
    """The 24-bit master, in fp32, of a bf16 weight and its int8 remainder; see :func:`join`."""
    return _joined(weight, remainder.to(torch.int32) << 8)


def _joined(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 sum of a bf16 weight and a remainder; a zero's negative remainder counts as 0."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    low = torch.where((high & _ABS) == 0, low.clamp(min=0), low)
    return (high + low).view(torch.float32)


def _cut(values: Tensor, bits: Tensor, low: int) -> Tensor:
    """The bits of fp32 numbers after random bits are added and the low bits cleared, sign kept."""
    b = _canonical_bits(values)
    magnitude = b & _ABS
    rounded = ((magnitude + (bits & low)) & ~low).clamp(max=_INF - (low + 1))  # stays finite
    return b & ~_ABS | torch.where(magnitude < _INF, rounded, magnitude)


def round_stochastic(values: Tensor, bits: Tensor) -> Tensor:
    """Round contiguous fp32 to bf16, away from 0 with a probability equal to the fraction cut off.

    Of the int32 random bits the low 16 are used. Values that bf16 holds stay; the expectation of
    others is exact, up to the largest finite bf16, which finite values never exceed.
    """
    return _bf16_of(_cut(values, bits, 0xFFFF) >> 16)


def kahan_split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Round fp32 to the nearest bf16, and the rounding error to bf16 as well.

    Returns:
        bf16 weight and bf16 residual of the same shape: 16 mantissa bits together, so updates below
        2^-17 of the weight are still lost. A weight that is not finite has the residual 0, and a
        zero keeps its sign. Splitting the result of :func:`kahan_join` changes no bit.
    """
    weight = master.to(torch.bfloat16)
    lost = torch.where(weight.isfinite(), master - weight.float(), 0.0).to(torch.bfloat16)
    # the residual may round up to half a gap, so that the sum rounds to a neighbour of the weight
    held = torch.where(lost == 0, weight.float(), weight.float() + lost.float())
    weight = held.to(torch.bfloat16)
    return weight, torch.where(weight.isfinite(), held - weight.float(), 0.0).to(torch.bfloat16)


def kahan_join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 sum of a bf16 weight and its residual.

    It is the weight itself where the residual is 0 (the sum of -0 and +0 would be +0), and where
    the sum does not round to the weight, which was then written since the split.
    """
    own, total = weight.float(), weight.float() + residual.float()
    fits = (residual != 0) & (total.to(torch.bfloat16) == weight)
    return torch.where(fits, total, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingMode:
    """How an fp32 value is stored in a weight from one step to the next.

    Its number in the C++ kernel is its position in :data:`ROUNDING`; Triton uses its name.
    """

    name: Update  # its name in policies, optimizers and kernels
    weight: str  # what ``explain`` says of such weights
    master: str = "what the optimizer updates"  # and of the row of masters
    policy: str = ""  # the named policy that uses it, with bf16 weights; empty if several do
    # the ``master_dtype`` of such a policy: the weight's own dtype if weight and remainder together
    # hold less than fp32
    master_dtype: torch.dtype = torch.float32
    remainder_dtype: torch.dtype | None = None  # dtype stored beside the weight, None for nothing
    # whether ``split`` draws random bits, so that updates are right on average
    random: bool = False
    # maps an fp32 value, and int32 random bits if ``random``, to weight and remainder
    split: Callable[[Tensor, Any], tuple[Tensor, Tensor | None]]
    join: Callable[[Tensor, Tensor], Tensor] | None = None  # the inverse of ``split``
    # the policies to recommend for the updates that this mode loses; empty if it loses none
    advice: str = ""

    @property
    def bytes(self) -> int:
        """Bytes per parameter stored beside the weight."""
        return 0 if self.remainder_dtype is None else self.remainder_dtype.itemsize


_MODES = (
    RoundingMode(
        name="nearest",
        weight="16 bit, rounded to nearest: small updates are lost",
        split=lambda value, _: (value, None),  # copying into the weight rounds
        advice="bf16-split, bf16-kahan, bf16-sr or bf16-master",
    ),
    RoundingMode(
        name="split",
        weight="the upper 16 bits of the master, rounded to nearest",
        master="what the optimizer updates: weight and 16-bit remainder together, exact",
        policy="bf16-split",
        remainder_dtype=torch.int16,
        split=lambda value, _: split(value),
        join=join,
    ),
    RoundingMode(
        name="split24",
        weight="the upper 16 bits of the master, rounded to nearest",
        master="its upper 24 bits: weight and 8-bit remainder, the last bit right on average",
        policy="bf16-split24",
        remainder_dtype=torch.int8,
        random=True,
        split=split24,
        join=join24,
    ),
    RoundingMode(
        name="kahan",
        weight="16 bit, rounded to nearest; what is lost is carried along in bf16",
        policy="bf16-kahan",
        master_dtype=torch.bfloat16,
        remainder_dtype=torch.bfloat16,
        split=lambda value, _: kahan_split(value),
        join=kahan_join,
        advice="bf16-split or bf16-master",
    ),
    RoundingMode(
        name="stochastic",
        weight="16 bit, rounded stochastically: updates are right on average",
        policy="bf16-sr",
        master_dtype=torch.bfloat16,
        random=True,
        split=lambda value, bits: (round_stochastic(value, bits), None),
    ),
)
ROUNDING: dict[str, RoundingMode] = {mode.name: mode for mode in _MODES}
"""Every rounding mode by name. CONTRIBUTING.md says how to add one."""


def master(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """The fp32 values of weights and their remainders, whose dtype tells the rounding mode."""
    if remainder is None:
        return weight.float()
    joins = {mode.remainder_dtype: mode.join for mode in _MODES if mode.join is not None}
    return joins[remainder.dtype](weight, remainder)
