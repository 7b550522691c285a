"""Lists the public names of halfstep.formats; each is loaded on first use."""

from .blocks import (
    BLOCK_FORMATS as BLOCK_FORMATS,
    E8M0 as E8M0,
    FP8_BLOCK as FP8_BLOCK,
    FP8_TENSOR as FP8_TENSOR,
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NVFP4 as NVFP4,
    BlockFormat as BlockFormat,
    Quantized as Quantized,
)
from .floats import (
    BF16 as BF16,
    E2M1 as E2M1,
    E4M3FN as E4M3FN,
    E5M2 as E5M2,
    FORMATS as FORMATS,
    FP16 as FP16,
    FP32 as FP32,
    TF32 as TF32,
    FloatFormat as FloatFormat,
)
