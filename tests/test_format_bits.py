"""Bit fields of every number, against a view of torch's own bits as an integer, cut by shifts."""

import itertools
import math

import numpy as np
import pytest
import torch

from every import every
from halfstep.formats import BF16, E4M3FN, E5M2, FORMATS, FP16, FP32, TF32

INF, NAN = math.inf, math.nan
# name: exponent bits, mantissa bits, and the integer of the same width.
# Sources: IEEE 754-2019 table 3.5; OCP OFP8 1.0, tables 1 and 2.
WIDTHS = {
    "bf16": (8, 7, torch.int16),
    "fp16": (5, 10, torch.int16),
    "e4m3fn": (4, 3, torch.uint8),
    "e5m2": (5, 2, torch.uint8),
}


def every_pattern(name: str) -> tuple[list[int], list[float]]:
    """All 2^16 or 2^8 patterns, and the number that torch decodes from each."""
    exponent, mantissa, integer = WIDTHS[name]
    count = 2 ** (1 + exponent + mantissa)
    patterns = torch.arange(count, dtype=torch.int32)
    values = patterns.to(integer).view(FORMATS[name].dtype).double()
    return patterns.tolist(), values.tolist()


def fields(pattern: int, name: str) -> tuple[int, int, int]:
    exponent, mantissa, _ = WIDTHS[name]
    return (
        pattern >> (exponent + mantissa),
        (pattern >> mantissa) & (2**exponent - 1),
        pattern & (2**mantissa - 1),
    )


def same(left: float, right: float) -> bool:
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return left == right and math.copysign(1, left) == math.copysign(1, right)


def test_the_fields_of_every_pattern_are_torch_s():
    def check(name):
        form = FORMATS[name]
        patterns, values = every_pattern(name)
        assert len(patterns) in (256, 65536)
        for pattern, value in zip(patterns, values, strict=True):
            if not math.isnan(value):
                assert form.bits_of(value) == fields(pattern, name)

    every(WIDTHS, check)


def test_nan_is_a_pattern_that_torch_reads_as_nan():
    def check(name, sign):
        exponent, mantissa, integer = WIDTHS[name]
        s, e, m = FORMATS[name].bits_of(math.copysign(NAN, sign))
        assert s == (sign < 0)
        pattern = torch.tensor((s << exponent | e) << mantissa | m, dtype=torch.int32)
        assert pattern.to(integer).view(FORMATS[name].dtype).isnan()
        # Quiet: IEEE 754-2019 6.2.1. E4M3FN has but one NaN of either sign, all ones.
        assert m == (2**mantissa - 1 if name == "e4m3fn" else 2 ** (mantissa - 1))

    every(itertools.product(WIDTHS, (1.0, -1.0)), check)


def test_tf32_fields_are_the_upper_19_bits_of_fp32():
    # tf32 is fp32 with 10 of its 23 mantissa bits (NVIDIA A100 whitepaper).
    for pattern in range(0, 2**19, 7):
        value = float(np.uint32(pattern << 13).view(np.float32))
        if not math.isnan(value):
            assert TF32.bits_of(value) == (pattern >> 18, pattern >> 10 & 255, pattern & 1023)


NOT_HELD = [
    (FP16, 0.1), (FP16, 65505.0), (FP16, 65536.0), (FP16, 2.0**-25), (FP16, 1 + 2.0**-11),
    (BF16, 257.0), (BF16, 1e39), (E4M3FN, INF), (E4M3FN, -INF), (E4M3FN, 480.0), (E5M2, 1.1),
    (FP32, 0.1), (FP32, 2.0**24 + 1), (FP32, 5e-324), (TF32, 1 + 2.0**-11),
]  # fmt: skip


def test_a_value_that_the_format_does_not_hold_has_no_bits():
    for form, value in NOT_HELD:
        with pytest.raises(ValueError, match=f"{form.name} does not hold"):
            form.bits_of(value)
