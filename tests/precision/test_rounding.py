"""Rounding that loses nothing, or nothing on average, against exact arithmetic on bit patterns.

The oracle for a value is NumPy's own fp64 of an fp32 pattern, and the definition-built table of all
bf16 numbers (``reference.floats``). Every distance and sum below is exact in fp64: neighbours share
a grid, and at most 24 + 16 bits are ever needed; the few others are Python fractions.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from halfstep.precision.masters.rounding import (
    join,
    join24,
    kahan_join,
    kahan_split,
    random_bits,
    round_stochastic,
    split,
    split24,
)
from reference import floats

ABS, INF, SIGN, QUIET = 0x7FFFFFFF, 0x7F800000, 0x80000000, 0x7FC00000
LARGEST_BF16 = 0x7F7F0000
LOWER = np.arange(2**16, dtype=np.uint32)
# Magnitudes of bf16 patterns 0 .. 0x7F80; infinity stands where rounding sees it, at 2^128.
BF16_VALUES = np.append(floats.BF16, 2.0**128)


def tensor(bits: np.ndarray) -> torch.Tensor:
    """The fp32 numbers of uint32 patterns."""
    return torch.from_numpy(np.ascontiguousarray(bits, dtype=np.uint32).view(np.float32))


def pattern(values: torch.Tensor) -> np.ndarray:
    """The patterns of fp32 or bf16 numbers, as uint32 or uint16."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy().view(np.uint32)


def exact(bits: np.ndarray) -> np.ndarray:
    """fp64 values of fp32 patterns."""
    return np.asarray(bits, dtype=np.uint32).view(np.float32).astype(np.float64)


def ints(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.uint32).view(np.int32))


# --- split masters ------------------------------------------------------------------------------


def check_split(uppers: np.ndarray) -> None:
    """Every law of ``split`` for all 2^16 lower halves of the given upper halves (uint32)."""
    bits = uppers[:, None] << np.uint32(16) | LOWER[None, :]
    weight, remainder = split(tensor(bits))
    assert weight.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    assert weight.shape == remainder.shape == bits.shape
    back, high = pattern(join(weight, remainder)), pattern(weight)
    special = (uppers & 0x7F80) == 0x7F80
    for rows, nan in ((~special, False), (special, True)):
        b, h, joined = bits[rows], high[rows], back[rows]
        assert np.array_equal(h >> 15, b >> 31), "a sign changed"
        if nan:
            quiet = np.where((b & ABS) > INF, (b & SIGN) | QUIET, b)
            assert np.array_equal(joined, quiet)
            assert np.array_equal(h, quiet >> 16)
            continue
        assert np.array_equal(joined, b), "join does not give the master back"
        value = np.abs(exact(b))
        down = uppers[rows] & 0x7FFF
        low, top = BF16_VALUES[down][:, None], BF16_VALUES[down + 1][:, None]
        chosen = h & 0x7FFF
        up = chosen == down[:, None] + 1
        assert np.array_equal(up, chosen != down[:, None]), "not one of the two neighbours"
        below, above = value - low, top - value
        assert not (np.where(up, above, below) > np.where(up, below, above)).any(), "not nearest"


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_split_every_exponent_and_every_lower_half(every):
    signed_exponents = np.arange(512, dtype=np.uint32) << np.uint32(7)
    mantissas = np.where(np.arange(512) % 2, 1, 0x2A).astype(np.uint32)
    uppers = np.concatenate([signed_exponents | 0x7F, signed_exponents | mantissas])
    ends = [signed_exponents[::8], signed_exponents[7::8]]  # zeros and infinities among them
    uppers = np.concatenate([uppers, *ends])
    for part in np.array_split(uppers[::every], 1 + 33 // every):
        check_split(part)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_split_every_fp32_number():
    for part in np.array_split(np.arange(2**16, dtype=np.uint32), 2048):
        check_split(part)


def all_bytes(bits: np.ndarray, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each number 256 times, with every low byte once and anything above it."""
    rest = np.random.default_rng(seed).integers(0, 2**24, (len(bits), 256), dtype=np.uint32)
    noise = rest << np.uint32(8) | np.arange(256, dtype=np.uint32)
    return tensor(np.repeat(bits[:, None], 256, axis=1)), ints(noise)


def check_split24(bits: np.ndarray, seed: int) -> None:
    """Every law of ``split24`` for fp32 patterns, over all 256 values of the random byte."""
    weight, remainder = split24(*all_bytes(bits, seed))
    assert weight.dtype == torch.bfloat16
    assert remainder.dtype == torch.int8
    got = pattern(join24(weight, remainder))
    finite = (bits & ABS) < INF
    b, g = bits[finite], got[finite]
    assert np.array_equal(g & SIGN, np.broadcast_to((b & SIGN)[:, None], g.shape))
    assert (g & 0xFF == 0).all(), "more than 24 bits"
    assert ((g & ABS) < INF).all(), "a finite number became infinite"
    magnitude, down = b & ABS, (b & ABS) & ~np.uint32(0xFF)
    up = np.where(magnitude == down, down, down + 0x100)
    up = np.minimum(up, 0x7F7FFF00)  # nothing finite lies above
    assert (((g & ABS) == down[:, None]) | ((g & ABS) == up[:, None])).all()
    # Two neighbours of 16 bits, 256 times: 24 bits, exact in fp64.
    inside = magnitude <= 0x7F7FFF00
    assert np.array_equal(exact(g[inside]).sum(1), 256 * exact(b[inside])), "a biased mean"
    special = bits[~finite]
    kept = np.where((special & ABS) > INF, (special & SIGN) | QUIET, special)
    assert np.array_equal(got[~finite], np.repeat(kept[:, None], 256, axis=1))


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_split24_every_lower_half_and_random_upper_halves(every):
    upper = np.random.default_rng(0).integers(0, 2**16, 2**16, dtype=np.uint32)
    assert ((upper & 0x7F80) == 0x7F80).sum() > 100  # infinities and NaN are among them
    bits = upper << np.uint32(16) | LOWER
    for part in np.array_split(bits[::every], 1 + 15 // every):
        check_split24(part, 0)


# --- stochastic rounding ------------------------------------------------------------------------


def sampled() -> np.ndarray:
    """Patterns over the whole finite range: random ones, subnormal ones, and both ends."""
    generator = np.random.default_rng(0)
    anywhere = generator.integers(0, LARGEST_BF16, 150, dtype=np.uint32)
    subnormal = generator.integers(1, 0x00800000, 20, dtype=np.uint32)
    top = LARGEST_BF16 - generator.integers(1, 0x20000, 10, dtype=np.uint32)
    ends = np.array([0, 1, 0xFFFF, 0x10000, 0x10001, 0x7FFFFF, 0x3F80FFFF, LARGEST_BF16 - 1], "u4")
    magnitudes = np.concatenate([anywhere, subnormal, top, ends])
    return np.concatenate([magnitudes, magnitudes | SIGN])


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_the_mean_over_all_random_halves_is_the_value(every):
    generator = np.random.default_rng(1)
    for bits in sampled()[::every]:
        noise = generator.integers(0, 2**16, 2**16, dtype=np.uint32) << np.uint32(16) | LOWER
        got = pattern(round_stochastic(tensor(np.full(2**16, bits)), ints(noise)))
        values, counts = np.unique(
            exact(got.astype(np.uint32) << np.uint32(16)), return_counts=True
        )
        total = sum(Fraction(v) * int(n) for v, n in zip(values, counts, strict=True))
        assert total == 2**16 * Fraction(float(exact(bits)))
        down = int(bits & ABS) >> 16
        assert set((got & 0x7FFF).tolist()) <= {down, down + 1}
        assert ((got >> 15) == bits >> 31).all()


def test_numbers_that_bf16_holds_never_move():
    highs = np.arange(2**16, dtype=np.uint32)
    highs = highs[(highs & 0x7FFF) <= 0x7F80]  # NaN has its own test
    noise = np.array([0, 1, 0x8000, 0xFFFE, 0xFFFF, 0xFFFFFFFF], dtype=np.uint32)
    values = tensor(np.repeat(highs[:, None] << np.uint32(16), len(noise), axis=1))
    got = pattern(round_stochastic(values, ints(np.broadcast_to(noise, values.shape))))
    assert np.array_equal(got, np.broadcast_to(highs[:, None], got.shape))


def test_beyond_the_largest_bf16_finite_numbers_stay_finite():
    bits = np.arange(LARGEST_BF16, INF, dtype=np.uint32)
    for sign in (0, SIGN):
        for noise in (0, 0x8000, 0xFFFF):
            bfloat = round_stochastic(tensor(bits | sign), ints(np.full(len(bits), noise)))
            assert (pattern(bfloat) == (LARGEST_BF16 | sign) >> 16).all()


def test_infinities_and_nan_are_kept():
    special = np.array([INF, INF | SIGN, QUIET, QUIET | SIGN, INF + 1, 0xFFFFFFFF], "u4")
    wanted = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7FC0, 0xFFC0], "u2")
    for noise in (0, 0xFFFF, 0xFFFFFFFF):
        got = round_stochastic(tensor(special), ints(np.full(len(special), noise)))
        assert np.array_equal(pattern(got), wanted)


# --- random bits --------------------------------------------------------------------------------


def lowbias32(x: np.ndarray) -> np.ndarray:
    """**Source:** lowbias32 of Wellons' hash-prospector, line by line on uint32."""
    x = np.asarray(x, dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = x ^ x >> np.uint32(16)
        x = x * np.uint32(0x7FEB352D)
        x = x ^ x >> np.uint32(15)
        x = x * np.uint32(0x846CA68B)
        return x ^ x >> np.uint32(16)


def oracle_bits(seed: int, step: int, stream: int, index: np.ndarray) -> np.ndarray:
    """Each of seed, step, stream and element number is hashed into what came before."""
    key = np.uint32(0)
    for part in (seed, step, stream):
        key = lowbias32(key ^ np.uint32(part % 2**32))
    return lowbias32(key ^ index.astype(np.uint32))


@pytest.mark.parametrize(
    ("seed", "step", "stream", "start"),
    [
        (0, 0, 0, 0),
        (1, 2, 3, 4),
        (-1, 1000, 7, 0),
        (2**40 + 5, 2**31, 2**20, 2**31 - 50),
        (123, 1, 0, 2**32 - 50),
    ],
)
def test_random_bits_are_the_documented_hash(seed, step, stream, start):
    got = random_bits(seed, step, 1000, stream=stream, start=start)
    assert got.dtype == torch.int32
    index = (np.arange(1000, dtype=np.uint64) + np.uint64(start)) % np.uint64(2**32)
    assert np.array_equal(got.numpy().view(np.uint32), oracle_bits(seed, step, stream, index))


# --- Kahan --------------------------------------------------------------------------------------


def kahan_samples() -> np.ndarray:
    """Finite patterns: everywhere, near and on the half way between bf16 numbers, subnormal."""
    generator = np.random.default_rng(5)
    anywhere = generator.integers(0, 2**32, 2**18, dtype=np.uint32)
    upper = generator.integers(0, 2**16, 2**14, dtype=np.uint32) << np.uint32(16)
    near = 0x8000 + generator.integers(-130, 131, 2**14)
    bits = np.concatenate([anywhere, upper | near.astype(np.uint32), sampled()])
    return bits[(bits & ABS) < 0x7F7F7F00]  # rounds to a finite bf16, with either residual


def test_weight_and_residual_are_both_nearest():
    bits = kahan_samples()
    weight, residual = kahan_split(tensor(bits))
    x = exact(bits)
    joined = kahan_join(weight, residual).double().numpy()
    # What the pair stands for is x with the residual rounded to bf16 once: half its gap at most.
    # The exact residual is a multiple of the gap of x, below 2^16 of them: exact in fp64.
    lost = x - floats.nearest(x, floats.BF16, math.inf)
    assert np.array_equal(joined, x - lost + floats.nearest(lost, floats.BF16, 0.0))
    # The weight alone is a bf16 nearest to that, the even one of two.
    assert np.array_equal(weight.double().numpy(), floats.nearest(joined, floats.BF16, math.inf))
    big = np.abs(x) > 2.0**-100  # away from subnormal residuals: 8 bits below half a gap
    assert (np.abs(joined - x)[big] <= np.abs(x)[big] * 2.0**-17).all()


def test_splitting_what_a_pair_stands_for_changes_no_bit():
    weight, residual = kahan_split(tensor(kahan_samples()))
    again = kahan_split(kahan_join(weight, residual))
    assert np.array_equal(pattern(again[0]), pattern(weight))
    assert np.array_equal(pattern(again[1]), pattern(residual))
    # and for every bf16 number without a residual
    highs = np.arange(2**16, dtype=np.uint32)
    highs = highs[(highs & 0x7FFF) <= 0x7F80]
    values = tensor(highs << np.uint32(16))
    weight, residual = kahan_split(values)
    assert np.array_equal(pattern(weight.float()), pattern(values))
    assert (residual == 0).all()
    # zeros keep their signs, so that a weight that nobody moves stays what it is to the bit
    assert np.array_equal(pattern(kahan_join(weight, residual)), pattern(values))


def test_kahan_with_numbers_that_are_not_finite():
    special = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, -3.4e38])
    weight, residual = kahan_split(special)
    assert weight.tolist()[:2] == [math.inf, -math.inf]
    assert weight[2].isnan()
    assert weight.tolist()[3:] == [math.inf, -math.inf]  # nearest, beyond the largest bf16
    assert residual.tolist() == [0.0] * 5
    joined = kahan_join(weight, residual)
    assert joined[2].isnan()
    assert not joined.isfinite().any()
    again, lost = kahan_split(kahan_join(weight, residual) + 1)
    assert torch.equal(again[:2], weight[:2])
    assert lost.tolist() == [0.0] * 5
