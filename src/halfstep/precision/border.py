"""Values from outside: what may be written as a name or given as a value, read once.

Policies are read by :func:`halfstep.precision.parse.parse_policy`.
"""

from __future__ import annotations

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.policy import DTYPES

_NAMES = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_NAMES["half"] = torch.float16


def as_dtype(value: str | torch.dtype) -> torch.dtype:
    """A dtype by name (``"bf16"``, ``"bfloat16"``) or by value.

    Raises:
        PrecisionError: If it is neither.
    """
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str) and value.lower().removeprefix("torch.") in _NAMES:
        return _NAMES[value.lower().removeprefix("torch.")]
    raise PrecisionError(f"dtype {value!r}; allowed: a torch.dtype, or {', '.join(DTYPES)}")


def as_device(value: str | torch.device) -> torch.device:
    """A device by name (``"cpu"``, ``"cuda:1"``) or by value.

    Raises:
        PrecisionError: If it is neither.
    """
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise PrecisionError(
            f"device {value!r}; allowed: a torch.device, or a name such as cpu, cuda or cuda:1"
        ) from None
