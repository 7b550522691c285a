"""Number formats from their bit patterns: every number decoded one by one, rounding by lookup.

**Source:** IEEE 754-2019, 3.4 (what a bit pattern means) and 4.3.1 (roundTiesToEven); OCP OFP8 1.0,
table 1 and 2 (E4M3: no infinity, only S.1111.111 is NaN).
"""

import numpy as np


def decode(pattern: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of one non-negative pattern as an infinite-range IEEE-like number (no specials)."""
    field, fraction = divmod(pattern, 2**mantissa_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    if field == 0:  # subnormal: no leading 1, the exponent of the smallest normal number
        return fraction * 2.0 ** (1 - bias - mantissa_bits)
    return (2**mantissa_bits + fraction) * 2.0 ** (field - bias - mantissa_bits)


def table(
    exponent_bits: int, mantissa_bits: int, finite_only: bool = False, has_nan: bool = True
) -> np.ndarray:
    """Every non-negative finite number of a format, ascending; index = bit pattern. fp64."""
    last = 2 ** (exponent_bits + mantissa_bits) - 1
    # fn formats: the all-ones pattern is NaN, if there is one. IEEE formats: the whole all-ones
    # exponent is inf/NaN.
    count = last + (not has_nan) if finite_only else last + 1 - 2**mantissa_bits
    return np.array([decode(p, exponent_bits, mantissa_bits) for p in range(count)])


def midpoints(values: np.ndarray) -> np.ndarray:
    """Where rounding to nearest changes its answer: between neighbours, and after the last.

    Exact in fp64: neighbours have at most 24 significant bits, so their mean has at most 25.
    """
    return (values + _above(values)) / 2


def _above(values: np.ndarray) -> np.ndarray:
    """The next larger number of each, for the last what an unbounded exponent would bring."""
    gap = values[-1] - values[-2]
    if np.frexp(values[-1])[0] == 0.5:  # a power of two: the gap doubles here
        gap *= 2
    return np.append(values[1:], values[-1] + gap)


def nearest(x: np.ndarray, values: np.ndarray, overflow: float) -> np.ndarray:
    """Round fp64 numbers to the nearest of a ``table``, ties to the even pattern.

    Args:
        x: fp64, any sign, NaN and inf allowed.
        values: From :func:`table`.
        overflow: What stands beyond the last value: inf, NaN for fn formats, or the last itself.
    """
    border = midpoints(values)
    magnitude = np.abs(x)
    below = np.searchsorted(border, magnitude, side="left")  # borders strictly below |x|
    tie = border[np.minimum(below, len(border) - 1)] == magnitude
    index = below + (tie & (below % 2 == 1))  # |x| on a border: the lower pattern if it is even
    grown = np.append(values, overflow)
    result = np.copysign(grown[np.minimum(index, len(values))], x)
    return np.where(np.isnan(x), np.nan, result)


def bracket(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The neighbours of in-range fp64 numbers: the largest <= x and the smallest >= x."""
    signed = np.unique(np.concatenate([-values, values]))
    low = signed[np.searchsorted(signed, x, side="right") - 1]
    high = signed[np.searchsorted(signed, x, side="left")]
    return low, high


FP16 = table(5, 10)
BF16 = table(8, 7)
E4M3FN = table(4, 3, finite_only=True)
E5M2 = table(5, 2)
E2M1 = table(2, 1, finite_only=True, has_nan=False)


def gap(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Distance from the largest number <= |x| to the next one up, in-range fp64 ``x``."""
    index = np.searchsorted(values, np.abs(x), side="right") - 1
    return (_above(values) - values)[index]
