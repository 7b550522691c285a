"""8-bit moments against a table of the numbers that 8 exponent and 3 mantissa bits make.

What a code stands for, from the definition in ``moments.py``: code + base is the pattern of a
number of an 8-bit exponent and 3 mantissa bits (``reference.floats`` decodes it in fp64), base is
8 * (top + 1) - 255, or - 127 with a sign, and code 0 is 0. Means over all random bits are exact.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from halfstep.optim.moments import BLOCK, decode, encode
from reference import floats

TOPS = range(32, 255)  # the lowest is a constant of the format; 254 is the largest fp32 exponent
GRID = floats.table(8, 3)  # every magnitude that some window has; index = pattern
NOISES = 2**20


def window(top: int, signed: bool) -> np.ndarray:
    """fp64 magnitudes of the codes of a block: 128 with a sign, else 256."""
    codes = 128 if signed else 256
    base = 8 * (top + 1) - (codes - 1)
    return np.array([0.0] + [floats.decode(base + code, 8, 3) for code in range(1, codes)])


def noise_for(values: np.ndarray, signed: bool) -> torch.Tensor:
    """32-bit words in which the moment's own 20 bits are ``values`` and the others random."""
    other = np.random.default_rng(0).integers(0, 2**12, values.shape, dtype=np.uint32)
    word = other << np.uint32(20) | values if signed else values << np.uint32(12) | other
    return torch.from_numpy(word.astype(np.uint32).view(np.int32))


def random_noise(count: int, seed: int) -> torch.Tensor:
    word = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(word.view(np.int32))


def stored(values: np.ndarray | torch.Tensor, noise: torch.Tensor, signed: bool) -> np.ndarray:
    """Values after a round trip through 8 bits, fp64."""
    x = torch.as_tensor(values, dtype=torch.float32)
    codes, tops = encode(x, "8bit", noise, signed=signed)
    assert codes.dtype == torch.uint8
    assert codes.shape == x.shape
    assert tops is not None
    assert tops.dtype == torch.uint8
    assert tops.shape == (-(-len(x) // BLOCK),)
    back = decode(codes, tops, signed=signed)
    assert back.dtype == torch.float32
    return back.double().numpy()


# --- codes --------------------------------------------------------------------------------------


def every_code() -> tuple[torch.Tensor, torch.Tensor]:
    """All 256 codes under all tops: two blocks a top."""
    codes = torch.arange(256, dtype=torch.int32).repeat(len(TOPS)).to(torch.uint8)
    return codes, torch.tensor(TOPS, dtype=torch.uint8).repeat_interleave(2)


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_under_every_top_is_its_number(signed):
    codes, tops = every_code()
    got = decode(codes, tops, signed=signed).double().numpy().reshape(len(TOPS), 256)
    for row, top in zip(got, TOPS, strict=True):
        wanted = window(top, signed)
        if signed:
            wanted = np.concatenate([wanted, -wanted])
        if top == 254:  # beyond the largest fp32 lies infinity; no value is stored as that code
            wanted = np.where(np.abs(wanted) >= 2.0**128, np.copysign(np.inf, wanted), wanted)
        assert np.array_equal(row, wanted)
        assert np.array_equal(np.signbit(row), np.signbit(wanted))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_storing_what_was_stored_changes_no_code(signed, seed):
    """Each block has one code that holds its top, and 127 others; all of every window are met."""
    generator = np.random.default_rng(seed)
    half = 128 if signed else 256
    last = half - 1  # this code alone is one exponent higher, so a block with it has another top
    blocks, tops = [], []
    for top in TOPS:
        rest = [c for c in range(256) if c % half != last]
        generator.shuffle(rest)
        for at in range(0, len(rest), 127):
            part = rest[at : at + 127]
            holder = last - 1 - int(generator.integers(0, 8))  # exponent = top
            block = np.array([holder, *part, *([0] * (127 - len(part)))])
            blocks.append(generator.permutation(block))
            tops.append(top)
    codes = torch.from_numpy(np.concatenate(blocks).astype(np.uint8))
    tops = torch.tensor(tops, dtype=torch.uint8)
    met = {(int(t), int(c)) for t, row in zip(tops, codes.view(-1, 128), strict=True) for c in row}
    assert len(met) == len(TOPS) * (254 if signed else 255)
    values = decode(codes, tops, signed=signed)
    again, new_tops = encode(values, "8bit", random_noise(len(codes), seed), signed=signed)
    assert torch.equal(new_tops, tops)
    assert torch.equal(again, codes)

    # A block whose largest number is the last code has another top, and the numbers are the same.
    whole, tops = every_code()
    whole, tops = whole[:-256], tops[:-2]  # under 254 the last code is no number
    values = decode(whole, tops, signed=signed)
    random = random_noise(len(values), seed)
    anew = decode(*encode(values, "8bit", random, signed=signed, again=True), signed=signed)
    assert torch.equal(anew.view(torch.int32), values.view(torch.int32))
    assert torch.equal(values.bfloat16().float(), values)  # as which a checkpoint has them


# --- rounding -----------------------------------------------------------------------------------


def over_all_noises(value: np.float32, holder: np.float32, signed: bool) -> Fraction:
    """The exact mean of what is stored for a value, over all 2^20 random numbers.

    Args:
        value: fp32.
        holder: Stands at the start of each block and sets its window.
        signed: A first moment.
    """
    rows = -(-NOISES // 127)
    noise = np.zeros((rows, BLOCK), dtype=np.uint32)
    noise[:, 1:] = np.resize(np.arange(NOISES, dtype=np.uint32), rows * 127).reshape(rows, 127)
    x = np.full((rows, BLOCK), value, dtype=np.float32)
    x[:, 0] = holder
    got = stored(x.reshape(-1), noise_for(noise.reshape(-1), signed), signed)
    drawn = got.reshape(rows, BLOCK)[:, 1:].reshape(-1)[:NOISES]
    values, counts = np.unique(drawn, return_counts=True)
    assert len(values) <= 2
    total = sum(Fraction(v) * int(n) for v, n in zip(values.tolist(), counts, strict=True))
    return total / NOISES


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        1.001,
        3e-4,
    ],
)
def test_the_mean_over_all_random_bits_is_exact_within_the_window(value, signed):
    for factor in (1.0, 2.0**-80, 2.0**100):
        x = np.float32(value * factor)
        # bits cut off: 20, and 20 random bits: the mean is exact, without a tolerance
        x = -x if signed and value < 1 else x
        assert over_all_noises(x, np.float32(factor), signed) == Fraction(float(x))


SMALLEST = float(window(127, signed=True)[1])
# Where a draw of 20 bits is compared with |x| / smallest: at most one of the 2^20 draws too many.
RESOLUTION = Fraction(SMALLEST) / NOISES


@pytest.mark.parametrize(
    "fraction",
    [
        1e-4,
        0.75,
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_first_moment_below_its_window_keeps_its_mean(fraction, sign):
    x = np.float32(sign * fraction * SMALLEST)
    mean = over_all_noises(x, np.float32(1.5), signed=True)
    assert abs(mean - Fraction(float(x))) <= RESOLUTION


@pytest.mark.parametrize("value", [0.99, 0.5, 1e-10, 1e-38, 1e-42, 2.0**-149])
def test_a_second_moment_is_never_0_unless_it_is_0(value):
    """Also far below the window, where the smallest code stands for it."""
    smallest = float(window(127, signed=False)[1])
    x = np.float32(min(value * smallest, value))
    x = x if x > 0 else np.float32(value)
    assert over_all_noises(x, np.float32(1.5), signed=False) == Fraction(smallest)
    zero = stored(np.array([1.5] + [0.0] * 127), random_noise(128, 0), signed=False)
    assert (zero[1:] == 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_huge_values_stay_finite(signed):
    largest = float(np.finfo(np.float32).max)
    x = np.array([largest, 3.39e38, 3.2e38, 2.0**127, 1e38, 0.0, 1e36] * 30, dtype=np.float32)
    for noise in (0, 0xFFFFF):
        got = stored(x, noise_for(np.full(len(x), noise, dtype=np.uint32), signed), signed)
        assert np.isfinite(got).all()
        # the largest number of 3 mantissa bits stands for all above it
        assert got[0] in GRID[-2:]
        # a neighbour errs by less than an eighth; the largest fp32, to the last but one, by that
        assert (np.abs(got - x) <= np.abs(x) * 0.126).all()
    infinite = np.array([np.inf] + [1.0] * 127, dtype=np.float32)
    assert np.isfinite(stored(infinite, random_noise(128, 0), signed)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_with_a_nan_is_nan_throughout(signed):
    values = torch.ones(300)
    values[140] = math.nan
    codes, tops = encode(values, "8bit", torch.zeros(300, dtype=torch.int32), signed=signed)
    back = decode(codes, tops, signed=signed)
    assert back[128:256].isnan().all()
    assert (back[:128] == 1).all()
    assert (back[256:] == 1).all()


@pytest.mark.parametrize("signed", [True, False])
def test_moments_that_went_through_bf16_are_encoded_as_they_were(signed):
    """Also where a block's largest was rounded up to a power of two, above the block's window."""
    g = torch.Generator().manual_seed(1)
    values = torch.randn(2**15, generator=g) * 10 ** torch.randn(2**15, generator=g)
    bits = torch.randint(-(2**31), 2**31 - 1, values.shape, dtype=torch.int32, generator=g)
    values = values if signed else values.abs()
    before = decode(*encode(values, "8bit", bits, signed=signed), signed=signed)
    assert torch.equal(before.bfloat16().float(), before)
    codes, tops = encode(before, "8bit", bits.flip(0), signed=signed, again=True)
    assert torch.equal(decode(codes, tops, signed=signed), before)
    codes, tops = encode(before, "8bit", bits.flip(0), signed=signed)
    assert torch.equal(decode(codes, tops, signed=signed), before) != signed  # 16 binades, not 32
