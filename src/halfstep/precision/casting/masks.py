"""The number to mask attention with, which keeps its meaning in the format in which it is added.

A mask is added to the scores before the softmax. Three constants go wrong: the lowest number of the
format, which becomes -inf as soon as two masks are added (a row of -inf is NaN after the softmax);
-1e9, which fp16 cannot hold; and a row in which everything is masked.
"""

from __future__ import annotations

import torch

from halfstep.precision.border import as_floating


def mask_value(dtype: str | torch.dtype) -> float:
    """The number to add to a score that shall not be attended to: ``finfo(dtype).min / 4``.

    It is the most negative number m that can be added twice to any score s of half the format's
    range, ``|s| <= max / 2``, and stay finite: ``s + 2 m >= -max / 2 - 2 max / 4 = -max``. A
    quarter is exact in binary. Beside an unmasked score t, the masked score's softmax is exactly 0
    if ``exp(s + m - t)`` underflows in fp32, that is if ``s - t < max / 4 - 104``. This holds for
    scores between -8000 and 8000 in fp16, and in bf16 and fp32 for all that occur in training.

    Args:
        dtype: The floating dtype, or its name, of the scores that the mask is added to.

    Raises:
        PrecisionError: If it is not floating.

    Example:
        >>> mask_value(torch.float16)
        -16376.0
    """
    return torch.finfo(as_floating(dtype, "mask_value(dtype)")).min / 4
