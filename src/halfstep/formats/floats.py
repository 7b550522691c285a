"""Floating-point formats as values: what each can hold, how finely, and how it rounds.

Everything here follows from the widths of the exponent and the mantissa by the definitions of
IEEE 754-2019 section 3.4, of the OCP 8-bit Floating Point Specification (OFP8) revision 1.0,
section 5, and, for e2m1, of the OCP Microscaling Formats (MX) 1.0, section 5.3.3. Nothing is read
from ``torch.finfo``, so that the tests can compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """One binary floating-point format: a sign bit, an exponent field and a mantissa field.

    Attributes:
        name: The short name users type, for example ``"bf16"``.
        exponent_bits: Width of the exponent field, in bits.
        mantissa_bits: Width of the stored mantissa field, in bits (the leading 1 is implied).
        dtype: The torch dtype that stores one number, or None: torch stores tf32 as fp32, and two
            numbers of e2m1 in a byte.
        finite_only: True for the OCP "fn" formats: no infinity, and only the all-ones pattern is
            NaN, which leaves the top exponent for numbers.
        has_nan: False for e2m1, whose every pattern is a number: what is beyond the largest becomes
            the largest.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype | None
    finite_only: bool = False
    has_nan: bool = True

    @property
    def bits(self) -> int:
        """Width of the whole number, in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The value subtracted from the exponent field: 2^(exponent_bits - 1) - 1."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """Largest finite value: 65504 for fp16, 448 for e4m3fn, 6 for e2m1."""
        if self.finite_only:
            return (2.0 - (1 + self.has_nan) * self.eps) * 2.0 ** (self.bias + 1)
        return (2.0 - self.eps) * 2.0**self.bias

    @property
    def min_normal(self) -> float:
        """Smallest positive number that has the full precision."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number: 2^-24 for fp16, 2^-149 for fp32."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Gap between 1 and the next larger number: 2^-mantissa_bits."""
        return 2.0**-self.mantissa_bits

    def ulp(self, value: float) -> float:
        """The gap between the numbers of this format around ``value``, which is in its range.

        Example:
            >>> BF16.ulp(1.0), FP16.ulp(2048.0)
            (0.0078125, 2.0)
        """
        if not abs(value) <= self.max:
            raise ValueError(f"{self.name} has no gap at {value}: allowed is |x| <= {self.max:g}")
        exponent = math.frexp(value)[1] - 1 if value else self.min_exponent
        return 2.0 ** (max(exponent, self.min_exponent) - self.mantissa_bits)

    def bits_of(self, value: float) -> tuple[int, int, int]:
        """Sign, biased exponent and mantissa of a number of this format, as they are stored.

        **Source:** IEEE 754-2019, 3.4 and 6.2.1 (the first mantissa bit of a quiet NaN is 1); OFP8
        1.0, table 1 (the NaN of E4M3 is S.1111.111).

        Example:
            >>> FP16.bits_of(1.5), FP16.bits_of(-(2.0**-24)), E4M3FN.bits_of(448.0)
            ((0, 15, 512), (1, 0, 1), (0, 15, 6))
        """
        sign = int(math.copysign(1.0, value) < 0)
        special = (1 << self.exponent_bits) - 1
        if math.isnan(value) and self.has_nan:
            quiet = 1 << (self.mantissa_bits - 1)
            return sign, special, 2 * quiet - 1 if self.finite_only else quiet
        if math.isinf(value) and not self.finite_only:
            return sign, special, 0
        magnitude = abs(value)
        if not magnitude <= self.max or not (magnitude / self.ulp(magnitude)).is_integer():
            raise ValueError(f"{self.name} does not hold {value!r}; round_to gives what it holds")
        if magnitude < self.min_normal:
            return sign, 0, int(magnitude / self.min_subnormal)
        fraction, exponent = math.frexp(magnitude)  # magnitude = fraction * 2^exponent, 1/2 <= f
        return sign, exponent - 1 + self.bias, int((2.0 * fraction - 1.0) / self.eps)

    def round_to(self, values: Tensor) -> Tensor:
        """Round every element to the nearest number of this format, ties to even.

        Args:
            values: Any shape, any floating dtype. The computation is in fp64, which holds every
                number of every format here, so that nothing is rounded twice.

        Returns:
            fp64, same shape. Beyond the largest: inf, NaN where the format has no infinity, or the
            largest where it has neither.

        **Source:** IEEE 754-2019, 4.3.1 (roundTiesToEven); OFP8 1.0, 5.2 (no saturation); OCP MX
        1.0, 6.3 (e2m1 saturates).

        Example:
            >>> FP16.round_to(torch.tensor([65519.0, 65520.0, 2.0**-25])).tolist()
            [65504.0, inf, 0.0]
        """
        x = values.double()
        exponent = torch.frexp(x).exponent.double() - 1
        gap = torch.exp2(exponent.clamp(min=self.min_exponent) - self.mantissa_bits)
        steps = torch.round(x / gap)
        rounded = torch.where(x.isfinite(), (steps * gap).copysign(x), x)  # -0 stays -0
        if not self.has_nan:
            return rounded.clamp(-self.max, self.max)
        beyond = rounded.abs() > self.max
        if self.finite_only:
            return torch.where(beyond, torch.full_like(x, math.nan), rounded)
        return torch.where(beyond, torch.full_like(x, math.inf).copysign(x), rounded)


FP32 = FloatFormat("fp32", 8, 23, torch.float32)
TF32 = FloatFormat("tf32", 8, 10, None)
BF16 = FloatFormat("bf16", 8, 7, torch.bfloat16)
FP16 = FloatFormat("fp16", 5, 10, torch.float16)
E4M3FN = FloatFormat("e4m3fn", 4, 3, torch.float8_e4m3fn, finite_only=True)
E5M2 = FloatFormat("e5m2", 5, 2, torch.float8_e5m2)

E2M1 = FloatFormat("e2m1", 2, 1, None, finite_only=True, has_nan=False)

FORMATS = {form.name: form for form in (FP32, TF32, BF16, FP16, E4M3FN, E5M2, E2M1)}
