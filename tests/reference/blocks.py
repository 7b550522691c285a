"""Block formats from their definition, in NumPy, by tables of numbers; and inputs to try them on.

Nothing here is read from halfstep. Elements are rounded by lookup in the table of all numbers of
their format; scales follow the formulas of the sources, each fp32 operation rounded once by NumPy.

**Source:** OCP Microscaling Formats (MX) 1.0, 5.2, 5.3, 5.4.1 and 6.3; for the scale that rounds up
and for NVFP4 the formulas of TransformerEngine's ``ptx.cuh`` and ``core_nvfp4.cuh``; for fp8 those
of torchao's ``float8_utils.py``. The hash is ``lowbias32`` of Wellons' hash-prospector.
"""

from __future__ import annotations

import numpy as np

from reference import floats

# The non-negative finite numbers of each format, ascending; a number's position is its code.
ELEMENTS = {"e4m3fn": floats.E4M3FN, "e5m2": floats.E5M2, "e2m1": floats.E2M1}
SIGN = {"e4m3fn": 0x80, "e5m2": 0x80, "e2m1": 0x08}
F = np.float32


def element_codes(y: np.ndarray, element: str) -> np.ndarray:
    """The code of each finite fp32 number: the nearest, ties to the even code, saturating."""
    table = ELEMENTS[element]
    number = floats.nearest(np.abs(y.astype(np.float64)), table, np.inf)
    code = np.searchsorted(table, np.minimum(number, table[-1]))
    return (code + np.where(np.signbit(y), SIGN[element], 0)).astype(np.uint8)


def element_numbers(codes: np.ndarray, element: str) -> np.ndarray:
    table, sign = ELEMENTS[element], SIGN[element]
    return np.where(codes & sign, -1.0, 1.0) * table[codes & (sign - 1)]


def _power_scale(amax: np.ndarray, element: str, up: bool) -> np.ndarray:
    """e8m0 codes: the exponent plus 127, from 0 to 254."""
    table = ELEMENTS[element]
    if not up:
        _, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction 2^exponent, below 1
        exponent = np.where(amax == 0, -999, exponent - 1 - int(np.floor(np.log2(table[-1]))))
    else:
        wanted = (amax * F(1.0 / table[-1])).astype(np.float64)  # one fp32 product
        fraction, exponent = np.frexp(wanted)  # wanted = fraction 2^exponent, 1/2 <= fraction < 1
        exponent = np.where(wanted == 0, -999, np.where(fraction == 0.5, exponent - 1, exponent))
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def quantize(
    x: np.ndarray,
    element: str,
    rule: str,
    block: tuple[int, int] | None,
    largest: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales (uint8 codes, or fp32) and the numbers in fp64 before the outer scale.

    The matrix ``x`` is (rows, columns), fp32 and finite. For the rule ``two-level`` a scale's code
    is that of e4m3. Blocks are scaled by their ``largest`` magnitude, unless one is given.
    """
    x = x.astype(F)
    rows, columns = block or x.shape
    tiles = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = np.abs(tiles).max(axis=(1, 3), keepdims=True)
    amax = amax if largest is None else np.full_like(amax, largest)
    top = F(ELEMENTS[element][-1])
    with np.errstate(over="ignore", divide="ignore", under="ignore", invalid="ignore"):
        if rule in ("floor", "rceil"):
            scales = _power_scale(amax, element, rule == "rceil")
            decode = np.ldexp(1.0, scales.astype(int) - 127)
            y = tiles.astype(np.float64) / decode
        elif rule == "amax":
            encode = (np.float64(top) / np.maximum(amax.astype(np.float64), 1e-12)).astype(F)
            scales = F(1) / encode
            decode, y = scales.astype(np.float64), tiles * encode
        else:
            outer = min(F(2688 if element == "e2m1" else np.nan) / amax.max(), np.finfo(F).max)
            outer = F(1) if amax.max() == 0 or outer == 0 else F(outer)
            wanted = np.minimum(amax * (outer * F(1 / 6)), F(448))
            scales = element_codes(wanted, "e4m3fn")
            decode = element_numbers(scales, "e4m3fn")
            encode = np.minimum(F(1) / (decode.astype(F) * (F(1) / outer)), np.finfo(F).max)
            y = tiles * encode.astype(F)
    codes = element_codes(y, element)
    numbers = element_numbers(codes, element) * decode
    shape = scales.shape[0], scales.shape[2]
    return codes.reshape(x.shape), scales.reshape(shape), numbers.reshape(x.shape)


def mix(x: np.ndarray) -> np.ndarray:
    """lowbias32: a bijection of 32-bit integers."""
    x = x.astype(np.uint32)
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_words(seed: int, count: int) -> np.ndarray:
    """uint32 words, a pure function of seed and position."""
    key = mix(np.array([seed], np.uint32))
    return mix(np.arange(count, dtype=np.uint32) ^ key)


# Name: the smallest and the largest exponent of a group of 32 numbers, how far below a number may
# lie, and what mantissas are made of.
PIECES = {
    "narrow": (0, 0, 4, "fp32"),
    "narrow bf16": (0, 0, 4, "bf16"),
    "wide": (0, 0, 36, "fp32"),
    "wide bf16": (0, 0, 14, "bf16"),
    "blocks apart": (-40, 40, 8, "fp32"),
    "blocks apart bf16": (-40, 40, 8, "bf16"),
    "ties": (-3, 3, 8, "ties"),
    "zeros": (-3, 3, 8, "zeros"),
    "largest": (124, 127, 12, "fp32"),
    "smallest": (-126, -110, 20, "fp32"),
}
_TAILS = np.array([0, 1, 0x0FFFFF, 0x080000, 0x07FFFF, 0x080001, 0x040000, 0x0C0000], np.uint32)


def piece(name: str, side: int) -> np.ndarray:
    """A (side, side) fp32 matrix of finite numbers, made of integer operations alone."""
    low, high, below, kind = PIECES[name]
    count = side * side
    seed = 8 * list(PIECES).index(name)
    group = np.repeat(random_words(seed, count // 32), 32)
    base = low + (group % np.uint32(high - low + 1)).astype(np.int64)
    field = base - (random_words(seed + 1, count) % np.uint32(below)).astype(np.int64) + 127
    words = random_words(seed + 2, count)
    fraction = words & np.uint32(0x7FFFFF)
    if kind == "bf16":
        fraction &= np.uint32(0x7F0000)
    elif kind == "ties":  # the upper three bits, and what is on a tie of some format or beside it
        fraction = (fraction & np.uint32(0x700000)) | _TAILS[random_words(seed + 3, count) % 8]
    bits = (
        np.where(field > 0, (np.maximum(field, 0) << 23).astype(np.uint32), np.uint32(0)) | fraction
    )
    if kind == "zeros":  # every other group wholly, and half of the rest
        bits = np.where((group & 256) | (words >> np.uint32(30) & 1), 0, bits).astype(np.uint32)
    bits |= words & np.uint32(0x80000000)
    return bits.view(F).reshape(side, side)


def bf16_patterns() -> np.ndarray:
    """(256, 256) fp32: every one of the 65,536 bf16 numbers, infinities and NaN among them."""
    return (np.arange(65536, dtype=np.uint32) << np.uint32(16)).view(F).reshape(256, 256)


def bell(seed: int, rows: int, columns: int) -> np.ndarray:
    """(rows, columns) fp32 numbers, about normal: sums of four random bytes, without their mean."""
    words = random_words(seed, rows * columns)
    total = sum(
        (words >> np.uint32(8 * byte) & np.uint32(255)).astype(np.int64) for byte in range(4)
    )
    return ((total - 510) / 128).astype(F).reshape(rows, columns)
