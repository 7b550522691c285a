"""The optimizer step on a GPU, in Triton: number formats, the update, and masters.

The update takes all tensors in one launch, each element read and written once. reference.py,
rules.py, moments.py and masters/rounding.py define every operation; the results here have the same
bits if launched with :data:`LAUNCH`: no fused multiply-add, and no subnormal numbers flushed to 0.

A program updates up to ``tiles`` tiles of one tensor, one after the other; a tile is ``rows``
blocks of 128 elements (the block of the 8-bit moments). ``owners`` gives its tensor and its place
there; ``table`` has the addresses, one row of int64 per tensor (see the column numbers below), but
for those of gradients. bf16 numbers are loaded and stored as uint16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Number formats. Each function repeats in uint32 what the one of similar name in
# precision/masters/rounding.py, reference.py or moments.py does.


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
    """The fp32 master of a stored weight and remainder; see ``reference.master``."""
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


@triton.jit
def _own(owners: tl.tensor, size: tl.constexpr):  # noqa: ANN202
    """The tensor of this program, and the first of the ``size`` elements of it that it takes."""
    own = owners + 2 * tl.program_id(0)
    return tl.load(own), tl.load(own + 1).to(tl.int64) * size


# The update.

# Columns of a row: addresses, then the number of elements and the random stream.
WEIGHT = tl.constexpr(0)
REMAINDER = tl.constexpr(1)
FIRST = tl.constexpr(2)
SECOND = tl.constexpr(3)
FIRST_TOPS = tl.constexpr(4)
SECOND_TOPS = tl.constexpr(5)
COUNT = tl.constexpr(6)
STREAM = tl.constexpr(7)
COLUMNS = tl.constexpr(8)

LANES = tl.constexpr(128)  # moments.BLOCK

# Compiler options of every kernel here; Triton's interpreter ignores them.
LAUNCH = {"enable_fp_fusion": False, "enable_reflect_ftz": False, "num_warps": 8}


@triton.jit
def _key(row: tl.tensor, seed: tl.tensor, step: tl.tensor, which: tl.constexpr) -> tl.tensor:
    """The ``random_key`` for the weight's random bits (``which`` 0) or the moments' (1)."""
    stream = (2 * tl.load(row + STREAM) + which).to(tl.uint32)
    return mix(mix(mix(seed.to(tl.uint32)) ^ step.to(tl.uint32)) ^ stream)


@triton.jit
def pointer(row: tl.tensor, column: tl.constexpr, dtype: tl.constexpr, aligned: tl.constexpr):  # noqa: ANN201
    """The address in a column of a table, as a pointer; ``aligned`` promises 16-byte alignment."""
    address = tl.load(row + column).to(tl.pointer_type(dtype))
    if aligned:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def load(address: tl.tensor, at: tl.tensor, count: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    """Load elements ``at``, 0 from ``count`` on; without a mask loads are 16 bytes wide."""
    if masked:
        return tl.load(address + at, mask=at < count, other=0)
    return tl.load(address + at)


@triton.jit
def _store(  # noqa: ANN202
    address: tl.tensor, at: tl.tensor, count: tl.tensor, value: tl.tensor, masked: tl.constexpr
):
    if masked:
        tl.store(address + at, value, mask=at < count)
    else:
        tl.store(address + at, value)


@triton.jit
def _read_moment(
    address: tl.tensor, tops: tl.tensor, at: tl.tensor, count: tl.tensor,
    moments: tl.constexpr, signed: tl.constexpr, masked: tl.constexpr, rows: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    block = tl.arange(0, rows)
    top = load(tops, block, (count + LANES - 1) // LANES, masked) if moments == "8bit" else block
    return decode_moment(load(address, at, count, masked), top, moments, signed)


@triton.jit
def _write_moment(  # noqa: ANN202
    address, tops, at, count, value, random,  # noqa: ANN001
    moments: tl.constexpr, signed: tl.constexpr, masked: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    if moments == "fp32":
        _store(address, at, count, value, masked)
    elif moments == "bf16":
        b = cut(canonical(value), random if signed else random >> 12, 0xFFFF) >> 16
        _store(address, at, count, b.to(tl.uint16), masked)
    else:
        codes, top = encode_moment(value, random, moments, signed)
        _store(address, at, count, codes, masked)
        _store(tops, tl.arange(0, rows), (count + LANES - 1) // LANES, top, masked)


@triton.jit
def _moved(w, g, m, v, c0, c1, c2, c3, c4, c5, c6, c7, rule: tl.constexpr):  # noqa: ANN001, ANN202
    """The new weight and moments; see ``rules.py``. A moment that a rule lacks is any number."""
    if rule == "adamw":  # c: beta1, 1 - beta1, beta2, 1 - beta2, decay, size, correction, eps
        m = m * c0 + g * c1
        v = v * c2 + (g * c3) * g
        w = w * c4 - tl.math.div_rn(m, tl.math.sqrt_rn(v) * c6 + c7) * c5
    elif rule == "sgd":  # c: momentum, fresh, decay, lr, direct, through
        g = g + w * c2
        m = m * c0 + g * c1
        w = w - (g * c4 + m * c5) * c3
    elif rule == "directed":  # c: decay, size
        w = w * c0 - g * c1
    elif rule == "set":
        w = g
    else:  # lion; c: beta1, 1 - beta1, beta2, 1 - beta2, decay, lr
        u = m * c0 + g * c1
        w = w * c4 - ((u > 0).to(tl.float32) - (u < 0).to(tl.float32)) * c5
        m = m * c2 + g * c3
    return w, m, v


@triton.jit
def _weights_at(row, start, update: tl.constexpr, aligned: tl.constexpr):  # noqa: ANN001, ANN202
    """Where a tensor's weights and remainders from ``start`` on are."""
    weight_type: tl.constexpr = tl.float32 if update == "fp32" else tl.uint16
    low_type: tl.constexpr = tl.uint16 if update == "kahan" else tl.int16
    remainder_type: tl.constexpr = tl.int8 if update == "split24" else low_type
    weight_at = pointer(row, WEIGHT, weight_type, aligned) + start
    return weight_at, pointer(row, REMAINDER, remainder_type, aligned) + start


@triton.jit
def _read_weight(  # noqa: ANN202
    weight_at, remainder_at, at, count, update: tl.constexpr, masked: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """The fp32 masters of stored weights."""
    weight = load(weight_at, at, count, masked)
    keeps: tl.constexpr = update == "split" or update == "split24" or update == "kahan"
    return joined_master(weight, load(remainder_at, at, count, masked) if keeps else weight, update)


@triton.jit
def _gradient_at(address, dtype: tl.constexpr, aligned: tl.constexpr):  # noqa: ANN001, ANN202
    """The gradient whose place in a table of addresses ``address`` is."""
    wide: tl.constexpr = tl.float32 if dtype == "fp32" else tl.float16
    return pointer(address, 0, tl.uint16 if dtype == "bf16" else wide, aligned)


@triton.jit
def _read_gradient(  # noqa: ANN202
    gradient, at, count, dtype: tl.constexpr, masked: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    """Elements of a gradient in fp32."""
    g = load(gradient, at, count, masked)
    return from_bits(g.to(tl.uint32) << 16) if dtype == "bf16" else g.to(tl.float32)


@triton.jit
def _write_weight(  # noqa: ANN202
    weight_at, remainder_at, at, count, w, random,  # noqa: ANN001
    update: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Store a master as a weight and its remainder; see ``reference._chunk``."""
    if update == "fp32":
        _store(weight_at, at, count, w, masked)
    elif update == "split":
        b = canonical(w)
        _store(weight_at, at, count, ((b + 0x8000) >> 16).to(tl.uint16), masked)
        _store(remainder_at, at, count, b.to(tl.uint16).to(tl.int16, bitcast=True), masked)
    elif update == "split24":
        b = cut(canonical(w), random, 0xFF) >> 8
        _store(weight_at, at, count, ((b + 0x80) >> 8).to(tl.uint16), masked)
        _store(remainder_at, at, count, b.to(tl.uint8).to(tl.int8, bitcast=True), masked)
    elif update == "stochastic":
        _store(
            weight_at, at, count, (cut(canonical(w), random, 0xFFFF) >> 16).to(tl.uint16), masked
        )
    elif update == "kahan":
        high, lost = kahan(w)
        high, lost = kahan(kahan_sum(high, lost))
        _store(weight_at, at, count, high.to(tl.uint16), masked)
        _store(remainder_at, at, count, lost.to(tl.uint16), masked)
    else:
        _store(weight_at, at, count, nearest(w).to(tl.uint16), masked)


@triton.jit
def _tile(  # noqa: ANN202
    row, gradient, start, count, seed, step, multiplier,  # noqa: ANN001
    c0, c1, c2, c3, c4, c5, c6, c7,  # noqa: ANN001
    rule: tl.constexpr, gradient_dtype: tl.constexpr, update: tl.constexpr, moments: tl.constexpr,
    aligned: tl.constexpr, masked: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Update elements ``start`` to ``start + 128 * rows`` of one tensor.

    ``gradient`` points to the gradient's address. All branches are the compiler's, and what no
    branch reads is not loaded.
    """
    at = tl.arange(0, rows)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    count = tl.minimum(count - start, rows * LANES).to(tl.int32)  # from ``start`` on
    element = at.to(tl.uint32) + start.to(tl.uint32)
    has_moments: tl.constexpr = rule != "directed" and rule != "set"
    small: tl.constexpr = tl.uint16 if moments == "bf16" else tl.uint8
    moment_type: tl.constexpr = tl.float32 if moments == "fp32" else small

    weight_at, remainder_at = _weights_at(row, start, update, aligned)
    w = _read_weight(weight_at, remainder_at, at, count, update, masked)
    gradient_at = _gradient_at(gradient, gradient_dtype, aligned) + start
    g = _read_gradient(gradient_at, at, count, gradient_dtype, masked) * multiplier

    m, v = g, g
    m_at = pointer(row, FIRST, moment_type, aligned) + start
    v_at = pointer(row, SECOND, moment_type, aligned) + start
    m_tops = pointer(row, FIRST_TOPS, tl.uint8, False) + start // LANES
    v_tops = pointer(row, SECOND_TOPS, tl.uint8, False) + start // LANES
    if has_moments:
        m = _read_moment(m_at, m_tops, at, count, moments, True, masked, rows)
    if rule == "adamw":
        v = _read_moment(v_at, v_tops, at, count, moments, False, masked, rows)
    w, m, v = _moved(w, g, m, v, c0, c1, c2, c3, c4, c5, c6, c7, rule)
    random = mix(element ^ _key(row, seed, step, 0))
    _write_weight(weight_at, remainder_at, at, count, w, random, update, masked)
    random = mix(element ^ _key(row, seed, step, 1))
    if has_moments:
        _write_moment(m_at, m_tops, at, count, m, random, moments, True, masked, rows)
    if rule == "adamw":
        _write_moment(v_at, v_tops, at, count, v, random, moments, False, masked, rows)


@triton.jit
def _task(owners, table, tile: tl.constexpr, tiles: tl.constexpr):  # noqa: ANN001, ANN202
    """A program's tensor: its number and row, its elements, and the first and last of the tiles."""
    task, start = _own(owners, tile * tiles)
    row = table + task * COLUMNS
    count = tl.load(row + COUNT)
    return task, row, count, start, tl.minimum(start + tile * tiles, count)


@triton.jit(do_not_specialize=["seed", "step"])
def update_kernel(  # noqa: ANN201
    owners, table, gradients, decision, seed, step, multiplier,  # noqa: ANN001
    c0, c1, c2, c3, c4, c5, c6, c7,  # noqa: ANN001
    rule: tl.constexpr, gradient_dtype: tl.constexpr, update: tl.constexpr, moments: tl.constexpr,
    aligned: tl.constexpr, decided: tl.constexpr, rows: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Update a program's tiles.

    ``decision`` points to the numbers of a ``DeviceDecision``, where the step is ``decided`` on the
    device: nothing changes if the first is above 0, and the second is a further factor.
    """
    if decided:
        if tl.load(decision) > 0:
            return
        multiplier = (tl.load(decision + 1) * multiplier).to(tl.float32)
    tile: tl.constexpr = rows * LANES
    task, row, count, start, end = _task(owners, table, tile, tiles)
    while start + tile <= end:
        _tile(row, gradients + task, start, count, seed, step, multiplier,
              c0, c1, c2, c3, c4, c5, c6, c7,
              rule, gradient_dtype, update, moments, aligned, False, rows)  # fmt: skip
        start += tile
    if start < end:
        _tile(row, gradients + task, start, count, seed, step, multiplier,
              c0, c1, c2, c3, c4, c5, c6, c7,
              rule, gradient_dtype, update, moments, aligned, True, rows)  # fmt: skip


@triton.jit
def masters_kernel(  # noqa: ANN201
    owners, table, values,  # noqa: ANN001
    update: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Read the fp32 masters of weights into ``values``, a table of addresses."""
    tile: tl.constexpr = rows * LANES
    task, row, count, start, end = _task(owners, table, tile, tiles)
    weight_at, remainder_at = _weights_at(row, start, update, aligned)
    value_at = pointer(values + task, 0, tl.float32, aligned) + start
    at = tl.arange(0, tile)
    for i in range(tiles):
        if start + (i + 1) * tile <= end:
            w = _read_weight(weight_at, remainder_at, at, count, update, False)
            _store(value_at, at, count, w, False)
        else:
            left = (end - start).to(tl.int32)
            w = _read_weight(weight_at, remainder_at, at, left, update, True)
            _store(value_at, at, left, w, True)
        at += tile
