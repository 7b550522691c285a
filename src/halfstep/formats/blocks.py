"""Formats below 16 bits whose numbers share scales: fp8, MXFP8, MXFP4 and NVFP4, as values.

A block of numbers is divided by a scale that brings its largest magnitude near the largest number
of a narrow *element* format, and rounded there. The rules for scales::

    rceil      the next power of two from amax / largest up, kept as e8m0; nothing saturates
    amax       amax / largest in fp32, where amax counts as at least 1e-12
    two-level  one fp32 scale of the tensor, amax / (448 largest), and in it one e4m3 scale a block,
               block amax / largest, rounded to nearest

where amax is the block's largest magnitude (of ``two-level``, first the tensor's) and ``largest``
the largest number of the element format. All arithmetic is fp32, in the order of the sources, so
that codes and scales are theirs bit for bit.

A block that holds an infinity or NaN has NaN as its scale: all its numbers become NaN, and what
watches for non-finite numbers sees it. (OCP MX 1.0 leaves this case to implementations; NVIDIA's
NVFP4 kernels saturate such numbers to the largest.)

**Source:** OCP Microscaling Formats (MX) 1.0, 5.2 and 5.4.1; cuBLAS 12.9, "1D block scaling" and
TransformerEngine ``ptx.cuh`` (``rceil``: amax times the fp32 reciprocal); torchao 0.18
``float8_utils.py`` and DeepSeek-V3 (arXiv 2412.19437), 3.3 (``amax``); TransformerEngine
``core_nvfp4.cuh`` and arXiv 2509.25149, appendix C (``two-level``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.formats.floats import E2M1, E4M3FN, E5M2, FP32, FloatFormat

ScaleRule = Literal["rceil", "amax", "two-level"]

LEAST_AMAX = 1e-12
"""What ``amax`` counts as at least. **Source:** torchao 0.18, ``float8_utils.EPS``."""

_ABS, _FRACTION, _HALF = 0x7FFFFFFF, 0x7FFFFF, 0x400000
_NAN = 0x7FC00000  # torch.nan's bits in fp32
_LARGEST_FP32 = FP32.max
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


class ExponentFormat:
    """e8m0, a format of scales: powers of two without sign, zero or infinity; all ones are NaN.

    **Source:** OCP MX 1.0, 5.4.1: 8 bits, bias 127, from 2^-127 to 2^127.
    """

    dtype = torch.float8_e8m0fnu

    def encode(self, values: Tensor) -> Tensor:
        """The codes, uint8, of the powers of two at or above fp32 ``values``, none negative.

        A code is the exponent plus 127. What is not finite, or above 2^127, is NaN.
        """
        bits = values.view(torch.int32)
        field, fraction = bits >> 23 & 0xFF, bits & _FRACTION
        # 2^-127 is subnormal in fp32, and the smallest number here
        field = field + torch.where(field == 0, fraction > _HALF, fraction != 0)
        return torch.where(values.isfinite(), field, 255).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The fp32 numbers of uint8 codes."""
        field = codes.to(torch.int32)
        bits = torch.where(field == 0, _HALF, field << 23)
        # NaN by its bits: a literal would be what a search for the first NaN finds
        return torch.where(field == 255, _NAN, bits).view(torch.float32)


E8M0 = ExponentFormat()

_SCALES: dict[str, FloatFormat | ExponentFormat] = {
    "rceil": E8M0,
    "amax": FP32,
    "two-level": E4M3FN,
}


class _Scales(NamedTuple):
    stored: Tensor  # as they are kept, one for each block: fp32, or uint8 codes
    encode: Tensor  # fp32: a number times it is on the grid of the element format
    outer: Tensor | None  # fp32, of the whole tensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """A tensor in a block format: codes, scales, and how to get the numbers back.

    Attributes:
        format: The block format.
        codes: In the tensor's shape: float8, or for e2m1 uint8 with one code of 4 bits each.
        stored: The scales as fp32, or codes in uint8: compiled code on a CPU knows no e8m0.
        outer: fp32, 0-dim: the scale of the whole tensor beside those of the blocks, or None.
        dim: The dim along which the blocks lie, which a product contracts.
    """

    format: BlockFormat
    codes: Tensor
    stored: Tensor
    outer: Tensor | None
    dim: int

    @property
    def scales(self) -> Tensor:
        """One for each block; the tensor's shape divided by the block's, 0-dim for one in all.

        float8_e8m0fnu, float8_e4m3fn or fp32.
        """
        dtype: Any = self.format.scale.dtype
        return self.stored.view(dtype)

    def operand(self) -> tuple[Tensor, Tensor | None]:
        """As an operand of a product in a wider format.

        Returns:
            fp32 in the shape of ``codes``: code times scale of its block, which is a bf16 number,
            too, unless scales of blocks are fp32 (of MX blocks below 2^-116 in e4m3, and 2^-102 in
            e5m2, some need more bits than bf16 has there); and the scale of the whole tensor that
            is left to multiply by, or None.
        """
        form, scales = self.format, self.stored
        values = _numbers(form.element, self.codes)
        if form.block is None:
            return values, scales
        if form.scale is not FP32:
            scales = E8M0.decode(scales) if form.scale is E8M0 else _numbers(E4M3FN, scales)
        return form.times(values, scales, self.dim), self.outer

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers: code times scale, which is exact but for the range, times outer scale."""
        values, left = self.operand()
        return (values if left is None else values * left).to(dtype)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Numbers of a narrow format in blocks that share a scale.

    Attributes:
        name: The short name users type, for example ``"nvfp4"``.
        element: The format of the numbers, of at most 8 bits.
        block: Rows and columns of a block; the columns lie along the contracted dim. None: the
            whole tensor is one block.
        rule: How scales are found: ``"rceil"``, ``"amax"`` or ``"two-level"``.
    """

    name: str
    element: FloatFormat
    block: tuple[int, int] | None
    rule: ScaleRule

    @property
    def scale(self) -> FloatFormat | ExponentFormat:
        """The format of the blocks' scales."""
        return _SCALES[self.rule]

    def quantize(self, x: Tensor, dim: int = -1, *, bits: Tensor | None = None) -> Quantized:
        """Round a tensor to this format.

        Args:
            x: fp32, bf16 or fp16, of any shape and layout.
            dim: The dim along which blocks lie: the one that a product contracts. The rows of
                blocks with several lie along the last of the others.
            bits: None rounds to nearest, ties to even. int32 random bits of the shape of ``x``
                round stochastically: up with a probability equal to the truncated fraction, to
                2^-24.

        Example:
            >>> q = MXFP8.quantize(torch.full((1, 32), 0.1))
            >>> q.codes[0, 0].item(), q.scales.float().item(), q.dequantize()[0, 0].item()
            (416.0, 0.000244140625, 0.1015625)
        """
        scales, y = self._scaled(x, dim)
        drawn = None if bits is None else self.split(bits, dim)
        codes = self.join(_codes(self.element, y, drawn), dim)
        if self.element.dtype is not None:
            codes = codes.view(self.element.dtype)
        stored = scales.stored
        if self.block is not None:
            stored = stored.squeeze(-1) if self.block[0] == 1 else stored.squeeze((-3, -1))
            stored = stored.movedim(-1, dim)
        return Quantized(self, codes, stored, scales.outer, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """A view with dims of its own for the columns of blocks, and for the rows of tall ones."""
        x = x.movedim(dim, -1)
        if self.block is None:
            return x
        rows, columns = self.block
        x = torch.unflatten(x, -1, (x.shape[-1] // columns, columns))
        return x if rows == 1 else torch.unflatten(x, -3, (x.shape[-3] // rows, rows))

    def join(self, blocks: Tensor, dim: int) -> Tensor:
        """The inverse of :meth:`split`."""
        if self.block is not None:
            blocks = blocks.flatten(-2)
            if self.block[0] > 1:
                blocks = blocks.flatten(-3, -2)
        return blocks.movedim(-1, dim)

    def times(self, values: Tensor, scales: Tensor, dim: int) -> Tensor:
        """Values, each times the scale of its block: the scales have the tensor's dims."""
        scales = scales.movedim(dim, -1).unsqueeze(-1)
        scales = scales if self.block is None or self.block[0] == 1 else scales.unsqueeze(-3)
        return self.join(self.split(values, dim) * scales, dim)

    def _scaled(self, x: Tensor, dim: int) -> tuple[_Scales, Tensor]:
        """The scales, and the tensor in blocks and fp32, divided by them and saturated."""
        self.check(x.shape, x.dtype, dim)
        blocks = self.split(x, dim).float()
        if self.block is None:
            largest = blocks.abs().amax() if x.numel() else blocks.new_zeros(())
        else:
            largest = blocks.abs().amax((-1,) if self.block[0] == 1 else (-3, -1), keepdim=True)
        scales = _scales_of(self, largest)
        top = self.element.max
        return scales, (blocks * scales.encode).clamp_(-top, top)

    def check(self, shape: Sequence[int], dtype: torch.dtype, dim: int) -> None:
        """Refuse what cannot be cut into whole blocks, or is no fp32, bf16 or fp16."""
        if dtype not in _TAKEN:
            raise PrecisionError(
                f"{self.name} is made of fp32, bf16 or fp16, and the tensor is {dtype}; convert it"
            )
        if self.block is None:
            return
        rows, columns = self.block
        if len(shape) < 1 + (rows > 1) or not -len(shape) <= dim < len(shape):
            raise PrecisionError(
                f"{self.name} has blocks of {rows}x{columns} along dim {dim}, and the tensor's "
                f"shape is {tuple(shape)}"
            )
        along, last = dim % len(shape), len(shape) - 1
        for at, size in ((along, columns), (last if along < last else last - 1, rows)):
            if shape[at] % size:
                raise PrecisionError(
                    f"{self.name} has blocks of {size} along dim {at}, and the tensor has "
                    f"{shape[at]} there (shape {tuple(shape)}); pad it to "
                    f"{-(-shape[at] // size) * size}, or keep this layer in bf16"
                )


def _codes(form: FloatFormat, y: Tensor, bits: Tensor | None) -> Tensor:
    """uint8 codes of fp32 numbers within the format's range; NaN gets all ones."""
    ones = (1 << (form.bits - 1)) - 1
    if bits is None and form.dtype is not None:  # torch's cast rounds alike, in one pass
        return torch.where(y.isnan(), ones, y.to(form.dtype).view(torch.uint8))
    least = 127 + form.min_exponent
    field = ((y.view(torch.int32) & _ABS) >> 23).clamp_(min=least)
    # in gaps of the format; exact: a power of two
    steps = y.abs() * ((254 + form.mantissa_bits - field) << 23).view(torch.float32)
    if bits is None:
        steps = steps.round_()
    else:
        below = steps.floor()
        noise = (bits >> 8 & 0xFFFFFF).float() * 2.0**-24
        steps = below + (noise < steps - below)
    # Subnormal and normal numbers alike: a carry from the mantissa raises the exponent field.
    magnitude = steps.nan_to_num_(0.0).to(torch.int32) + (field - least << form.mantissa_bits)
    sign = y.view(torch.int32) >> (32 - form.bits) & (ones + 1)
    return torch.where(y.isnan(), ones, magnitude | sign).to(torch.uint8)


def _numbers(form: FloatFormat, codes: Tensor) -> Tensor:
    """The fp32 numbers of a format's codes, float8 or uint8."""
    if form.dtype is not None:
        return codes.view(form.dtype).float()
    # e2m1, which torch does not store: its bits are those of an e4m3 number 2^6 times smaller
    wide = codes << 4 & 0x80 | codes << 2 & 0x1C
    return wide.view(torch.float8_e4m3fn).float() * 64.0


def _scales_of(form: BlockFormat, largest: Tensor) -> _Scales:
    """The scales of blocks by their largest magnitudes; see the top of this file."""
    top = form.element.max
    if form.rule == "rceil":
        codes = E8M0.encode(largest * (1.0 / top))
        inverse = torch.where(codes == 255, 255, 254 - codes.int())
        return _Scales(codes, E8M0.decode(inverse), None)
    lost = largest - largest  # NaN, by no literal, where that is not finite; otherwise 0
    if form.rule == "amax":
        encode = _over(top, largest.double().clamp(min=LEAST_AMAX))
        return _Scales(_over(1.0, encode) + lost, encode + lost, None)
    finite = torch.where(largest.isfinite(), largest, 0.0)
    amax = finite.amax() if largest.numel() else largest.new_zeros(())
    outer = _over(E4M3FN.max * top, amax).clamp(max=_LARGEST_FP32)
    outer = torch.where(amax == 0, 1.0, outer)
    rest = _over(1.0, outer)  # undoes the scale of the tensor
    wanted = (largest * (outer * (1.0 / top))).clamp(max=E4M3FN.max)
    codes = _codes(E4M3FN, wanted + lost, None)
    encode = _over(1.0, _numbers(E4M3FN, codes) * rest).clamp(max=_LARGEST_FP32)
    return _Scales(codes, encode, rest)


def _over(number: float, x: Tensor) -> Tensor:
    """A number divided by a tensor, in fp32 and rounded to nearest on every device.

    torch's own ``/`` would take the reciprocal first, and a GPU's compiled fp32 division is not
    exact. fp64 division is, and its 53 bits are enough for no second rounding to show.

    **Source:** Figueroa, "When is double rounding innocuous?", SIGNUM 30(3), 1995.
    """
    x = x.double()
    return (torch.full_like(x, number) / x).float()


MXFP8 = BlockFormat("mxfp8", E4M3FN, (1, 32), "rceil")
MXFP4 = BlockFormat("mxfp4", E2M1, (1, 32), "rceil")
NVFP4 = BlockFormat("nvfp4", E2M1, (1, 16), "two-level")
FP8_TENSOR = BlockFormat("fp8", E4M3FN, None, "amax")
FP8_BLOCK = BlockFormat("fp8-block", E4M3FN, (1, 128), "amax")

BLOCK_FORMATS: dict[str, BlockFormat] = {
    form.name: form
    for form in (
        FP8_TENSOR,
        BlockFormat("fp8-e5m2", E5M2, None, "amax"),
        FP8_BLOCK,
        BlockFormat("fp8-block-2d", E4M3FN, (128, 128), "amax"),
        MXFP8,
        BlockFormat("mxfp8-e5m2", E5M2, (1, 32), "rceil"),
        MXFP4,
        NVFP4,
        BlockFormat("nvfp4-2d", E2M1, (16, 16), "two-level"),
    )
}
"""The block formats by name; those with ``2d`` are for weights, whose blocks are square."""
