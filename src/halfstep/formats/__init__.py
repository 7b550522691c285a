"""Number formats as values: single numbers (``floats``), and blocks that share a scale."""

from halfstep.formats.blocks import (
    BLOCK_FORMATS,
    E8M0,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockFormat,
    Quantized,
    block_format,
)
from halfstep.formats.floats import (
    BF16,
    E2M1,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    TF32,
    FloatFormat,
)

__all__ = [
    "BF16",
    "BLOCK_FORMATS",
    "E2M1",
    "E4M3FN",
    "E5M2",
    "E8M0",
    "FORMATS",
    "FP8_BLOCK",
    "FP8_TENSOR",
    "FP16",
    "FP32",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "TF32",
    "BlockFormat",
    "FloatFormat",
    "Quantized",
    "block_format",
]
