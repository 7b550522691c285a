"""Validation of users' arguments, which may be a name (``"bf16"``) or a value.

Each function here raises a PrecisionError that says where, what was given and what is allowed
instead. Policies are parsed by :func:`halfstep.precision.policy.spelling.parse_policy`.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from halfstep.errors import PrecisionError

T = TypeVar("T")


def require(value: object, kind: type[T] | tuple[type[T], ...], where: str, allowed: str) -> T:
    """Refuse a value of the wrong class; ``where`` is as ``"EMA(model)"``, ``allowed`` in words."""
    if isinstance(value, kind):
        return value
    name = f"class ({value.__name__})" if isinstance(value, type) else type(value).__name__
    given = repr(value) if isinstance(value, str | int | float | None) else f"a {name}"
    raise PrecisionError(f"{where} got {given[:80]}; allowed: {allowed}")


def require_model(value: object, where: str) -> nn.Module:
    """Refuse anything but a ``torch.nn.Module`` instance: a class, parameters, an optimizer."""
    return require(value, nn.Module, where, "a torch.nn.Module")


def as_device(value: str | torch.device) -> torch.device:
    """A device by name (``"cpu"``, ``"cuda:1"``) or by value."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise PrecisionError(
            f"device {value!r}; allowed: a torch.device, or a name such as cpu, cuda or cuda:1"
        ) from None
