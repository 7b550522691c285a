"""Attention masks that keep their meaning in the format in which they are added.

A mask is added to the scores before the softmax. Three constants go wrong: the lowest number of the
format, which becomes -inf as soon as two masks are added (a row of -inf is NaN after the softmax);
-1e9, which fp16 cannot hold; and a row in which everything is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.border import as_floating, as_number
from halfstep.precision.policy.policy import dtype_name

# The smallest magnitude that libraries use for "masked" in an additive mask.
# Source: google-research/bert, modeling.py, attention_layer: (1.0 - attention_mask) * -10000.0
_MASKED = -1e4
_SHOWN = 3


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


def check_mask(
    mask: Tensor | float, *, what: str = "attention mask", dtype: str | torch.dtype | None = None
) -> None:
    """Refuse a mask that would cause NaN, or that changes its meaning in the scores' dtype.

    ``-inf`` is allowed, unless a whole row has it.

    Args:
        mask: Shape (..., S), its last dim the keys. Booleans as in
            ``torch.nn.functional.scaled_dot_product_attention`` (True takes part); a floating mask
            is added to the scores. Or just the constant that a mask is filled with.
        what: The mask's name in the message.
        dtype: The dtype of the scores, or its name, if it is not the mask's own.

    Raises:
        PrecisionError: For NaN, numbers beyond the dtype, numbers that become infinite when two
            such masks are added, and rows in which everything is masked (at or below -1e4); or if
            an argument is not a mask or not a floating dtype.
    """
    if not isinstance(mask, Tensor):
        mask = as_number(mask, "check_mask(mask)", "a tensor, or the number it is filled with")
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        _check_rows(~mask, what)
        return
    constant = not isinstance(mask, Tensor)
    values = torch.as_tensor(mask, dtype=torch.float64 if constant else None).detach()
    if not values.is_floating_point():
        raise PrecisionError(
            f"the {what} is {dtype_name(values.dtype)}: added to the scores, its 1 and 0 mask "
            "nothing; use mask.bool(), or 0 and halfstep.mask_value(dtype)"
        )
    own = torch.float32 if constant else values.dtype
    scores = own if dtype is None else as_floating(dtype, "check_mask(dtype)")
    form, limit = dtype_name(scores), torch.finfo(scores).max
    if bool(values.isnan().any()):
        raise PrecisionError(f"the {what} holds {int(values.isnan().sum())} NaN; allowed: none")
    finite = values[values.isfinite()].double()
    remedy = f"use halfstep.mask_value({scores}) = {mask_value(scores):g}"
    beyond = finite[finite.abs() > limit]
    if beyond.numel():
        raise PrecisionError(
            f"the {what} holds {beyond[0].item():g}, which does not fit {form} (lowest "
            f"{-limit:g}); {remedy}"
        )
    doubled = finite[finite < -limit / 2]
    if doubled.numel():
        raise PrecisionError(
            f"the {what} holds {doubled.min().item():g}: added to another such mask it is -inf in "
            f"{form} (finfo.min doubled), and a row of -inf is NaN after the softmax; {remedy}"
        )
    if not constant:
        _check_rows(values <= _MASKED, what)


def _check_rows(masked: Tensor, what: str) -> None:
    """Refuse rows in which every element is masked; a 0-dim mask has no rows."""
    if not masked.dim() or not masked.shape[-1]:
        return
    rows = masked.all(dim=-1)
    if not bool(rows.any()):
        return
    found = rows.nonzero().tolist()
    first = ", ".join(str(row[0] if len(row) == 1 else tuple(row)) for row in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    where = f"row {first}{more}" if rows.dim() else "its only row"
    raise PrecisionError(
        f"the {what} masks everything in {where} of {rows.numel()}: softmax has nothing to choose "
        "from there (NaN, or the mean of what is masked); unmask one position of such rows and "
        "drop their result"
    )
