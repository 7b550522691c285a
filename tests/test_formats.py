"""FloatFormat against the standards' tables, against decoded bit patterns, and against torch."""

import doctest

import numpy as np
import pytest
import torch

import halfstep.formats.floats
from every import every
from halfstep.formats import (
    E2M1,
    E4M3FN,
    FORMATS,
    FP16,
    FP32,
    FloatFormat,
)
from reference import floats

# name: bits, exponent bits, mantissa bits, bias, largest finite, smallest normal, smallest
# positive, gap above 1. Sources: IEEE 754-2019 table 3.5 (binary32, binary16); OCP OFP8 1.0,
# tables 1 and 2; bfloat16: the upper half of binary32; tf32: binary32's exponent with binary16's
# mantissa (NVIDIA A100 whitepaper, "TensorFloat-32"); e2m1: OCP MX 1.0, table 5.
STANDARD = {
    "fp32": (32, 8, 23, 127, float.fromhex("0x1.fffffep127"), 2.0**-126, 2.0**-149, 2.0**-23),
    "tf32": (19, 8, 10, 127, float.fromhex("0x1.ffcp127"), 2.0**-126, 2.0**-136, 2.0**-10),
    "bf16": (16, 8, 7, 127, float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133, 2.0**-7),
    "fp16": (16, 5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
    "e4m3fn": (8, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 2.0**-3),
    "e5m2": (8, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2),
    "e2m1": (4, 2, 1, 1, 6.0, 1.0, 0.5, 0.5),
}
TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
TABLES = {
    "bf16": floats.BF16,
    "fp16": floats.FP16,
    "e4m3fn": floats.E4M3FN,
    "e5m2": floats.E5M2,
    "e2m1": floats.E2M1,
    "tf32": floats.table(8, 10),
}


def fp64(values) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64))


def rounded(form: FloatFormat, values) -> np.ndarray:
    return form.round_to(fp64(values)).numpy()


def overflow(name: str) -> float:
    return {"e4m3fn": float("nan"), "e2m1": 6.0}.get(name, float("inf"))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal numbers, equal signs (of zeros too), NaN where NaN."""
    signs = np.signbit(left) == np.signbit(right)
    return bool(np.all(np.where(np.isnan(right), np.isnan(left), (left == right) & signs)))


def test_numbers_equal_the_standard():
    def check(name):
        f = FORMATS[name]
        widths = f.bits, f.exponent_bits, f.mantissa_bits, f.bias
        assert (*widths, f.max, f.min_normal, f.min_subnormal, f.eps) == STANDARD[name]
        assert f.name == name
        assert f.min_exponent == 1 - f.bias
        assert f.dtype == TORCH.get(name)

    every(STANDARD, check)


def test_the_reference_table_is_every_8_bit_number_that_torch_knows():
    def check(name):
        patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        known = patterns.view(TORCH[name]).double().numpy()
        finite = known[np.isfinite(known)]
        values = TABLES[name]
        assert np.array_equal(finite, np.concatenate([values, -values]))
        # OFP8: E4M3 has 2 NaN patterns and no inf; E5M2 has 6 NaN patterns and 2 inf.
        assert np.isnan(known).sum() == {"e4m3fn": 2, "e5m2": 6}[name]
        assert np.isinf(known).sum() == {"e4m3fn": 0, "e5m2": 2}[name]

    every(("e4m3fn", "e5m2"), check)


def test_every_midpoint_goes_to_even_and_one_fp64_ulp_beside_it_to_the_nearer():
    def check(name):
        values = TABLES[name]
        ties = floats.midpoints(values)
        assert len(ties) == len(values)
        grown = np.append(values, overflow(name))
        index = np.arange(len(values))
        for sign in (1.0, -1.0):
            down = rounded(FORMATS[name], sign * np.nextafter(ties, 0.0))
            up = rounded(FORMATS[name], sign * np.nextafter(ties, np.inf))
            tie = rounded(FORMATS[name], sign * ties)
            assert same(down, sign * grown[index])
            assert same(up, np.copysign(grown[index + 1], sign))
            assert same(tie, np.copysign(grown[index + index % 2], sign))

    every(TABLES, check)


def test_fp32_equals_numpy_on_hard_cases():
    generator = np.random.default_rng(0)
    powers = 2.0 ** generator.uniform(-152, 129, 20_000) * generator.choice([-1, 1], 20_000)
    singles = generator.integers(0, 2**31 - 2**23, 20_000, dtype=np.int64).astype(np.uint32)
    exact = singles.view(np.float32)
    upper = np.nextafter(exact, np.float32(np.inf)).astype(np.float64)
    lower = exact.astype(np.float64)
    ties = lower + (np.minimum(upper, 2.0**128) - lower) / 2
    x = np.concatenate(
        [powers, lower, ties, np.nextafter(ties, 0.0), np.nextafter(ties, np.inf), -ties]
    )
    with np.errstate(over="ignore"):
        expected = x.astype(np.float32).astype(np.float64)
    assert same(rounded(FP32, x), expected)


def test_what_is_not_finite_stays_so_or_is_nan():
    x = fp64([float("inf"), float("-inf"), float("nan"), 1e30, 448.0])
    assert E4M3FN.round_to(x).isnan().tolist() == [True, True, True, True, False]
    for name in ("fp32", "tf32", "bf16", "fp16", "e5m2"):
        found = FORMATS[name].round_to(x[:3])
        assert found.tolist()[:2] == [float("inf"), float("-inf")]
        assert found[2].isnan()
    with pytest.raises(ValueError, match="fp16 has no gap"):
        FP16.ulp(65504.01)


def test_e2m1_saturates_and_keeps_what_is_no_number():
    x = fp64([6.9, 7.0, 1e300, -np.inf, np.nan, -0.25, 0.25, 0.75, 2.5, 5.0])
    want = np.array([6.0, 6.0, 6.0, -6.0, np.nan, -0.0, 0.0, 1.0, 2.0, 4.0])  # ties to even codes
    assert same(E2M1.round_to(x).numpy(), want)
    assert [E2M1.bits_of(value) for value in (0.5, -6.0, 1.0)] == [(0, 0, 1), (1, 3, 1), (0, 1, 0)]
    with pytest.raises(ValueError, match="e2m1 does not hold nan"):
        E2M1.bits_of(float("nan"))


def test_ulp_is_the_distance_to_the_next_number():
    def check(name):
        form, values = FORMATS[name], TABLES[name]
        picks = np.unique(np.linspace(0, len(values) - 2, 3000).astype(int))
        for i in picks:
            gap = values[i + 1] - values[i]
            inside = values[i] + gap / 3
            assert form.ulp(float(values[i])) == gap
            assert form.ulp(-float(inside)) == gap
        assert form.ulp(form.max) == values[-1] - values[-2]
        assert form.ulp(0.0) == form.ulp(-0.0) == form.min_subnormal

    every(TABLES, check)


def test_doctests():
    result = doctest.testmod(halfstep.formats.floats)
    assert result.attempted >= 2
    assert result.failed == 0
