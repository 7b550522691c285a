"""What a parameter group's options mean, and what is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.moments import Moments
from halfstep.precision.masters.rounding import ROUNDING, Update

_WEIGHTS = (torch.float32, torch.bfloat16)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class Storage(TypedDict, total=False):
    """How an optimizer stores weights and moments."""

    update: Update | None
    moments: Moments | None
    seed: int


def update_of(chosen: Update | None, parameter: Tensor) -> Update:
    """The rounding mode of a parameter; fp32 weights need none, so "nearest"."""
    return chosen or "nearest" if parameter.dtype == torch.bfloat16 else "nearest"


def require_option(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise unless ``holds``; the message begins like ``torch.optim``'s, which programs match."""
    if not holds:
        raise PrecisionError(f"Invalid {name}: {value}; allowed: {allowed}")


def check_storage(update: Update | None, moments: Moments | None) -> None:
    """Refuse an unknown rounding mode or format of moments."""
    for key, value, kind in (("update", update, Update), ("moments", moments, Moments)):
        if value not in (None, *get_args(kind)):
            raise PrecisionError(f"{key}={value!r}; allowed: {', '.join(get_args(kind))}")


# Of the numbers in a group's options: torch's name, the condition, and the condition in words.
_NUMBERS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "lr": ("learning rate", lambda x: x >= 0, "lr >= 0"),
    "eps": ("epsilon value", lambda x: x > 0, "eps > 0; with 0, elements at rest become NaN"),
    "weight_decay": ("weight_decay value", lambda x: x >= 0, ">= 0"),
    "momentum": ("momentum value", lambda x: x >= 0, ">= 0"),
}


def check_group(group: dict[str, Any], owner: str, has_masters: bool) -> None:
    """Refuse unknown or unsupported options, and parameters of unsupported dtype or strides."""
    for key, (name, holds, words) in _NUMBERS.items():
        require_option(bool(key not in group or holds(group[key])), name, group.get(key), words)
    for index, beta in enumerate(group.get("betas", ())):
        name = f"beta parameter at index {index}"
        require_option(0 <= beta < 1, name, beta, "betas: 0 <= beta < 1")
    if "dampening" in group and group["nesterov"] and (not group["momentum"] or group["dampening"]):
        raise PrecisionError("Nesterov momentum requires a momentum and zero dampening; give both")
    for key in ("update", "moments", "seed"):
        if key in group:
            raise PrecisionError(
                f"{key}={group[key]!r} is in a group, and all of {owner} is stored in one way; "
                f"give it to {owner} itself, or make a second one for this group"
            )
    for key in ("amsgrad", "capturable", "differentiable", "maximize"):
        if group.get(key):
            raise PrecisionError(
                f"{key}=True is not supported by halfstep.optim.{owner}; leave it out, or use "
                "torch.optim, for 16-bit weights under policy bf16-master"
            )
    for parameter in group["params"]:
        _check_parameter(parameter, owner, GRADIENTS if has_masters else _WEIGHTS)


def _check_parameter(parameter: Tensor, owner: str, dtypes: Sequence[torch.dtype]) -> None:
    shape, strides = tuple(parameter.shape), parameter.stride()
    if parameter.dtype not in dtypes:
        raise PrecisionError(
            f"a parameter of shape {shape} is {parameter.dtype}; {owner} keeps fp32 and bf16 "
            "weights. For fp16, call model.float() and use halfstep.Precision with policy "
            "fp16-master; keep others with one of torch.optim"
        )
    if any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)):
        raise PrecisionError(
            f"a parameter of shape {shape} and strides {strides} has elements that "
            "share memory; give each element its own (parameter.data = parameter.data.clone())"
        )


def no_update(silent: Sequence[Tensor], owner: str) -> PrecisionError:
    """The error for trainable bf16 weights in groups that give no rounding mode."""
    modes = ", ".join(f"{m.name!r} ({m.bytes})" for m in ROUNDING.values() if m.policy)
    return PrecisionError(
        f"{len(silent)} trainable tensors are bf16 and nothing says how they keep small updates: "
        f"make {owner} with update={modes}, in brackets the bytes per parameter; 'split' is exact, "
        "'nearest' loses them"
    )


def refused_gradient(parameter: Tensor, gradient: Tensor) -> PrecisionError:
    """The error for a gradient that no kernel accepts: sparse, or of another shape or dtype."""
    shape = tuple(parameter.shape)
    if gradient.is_sparse:
        return PrecisionError(
            f"the gradient of a parameter of shape {shape} is sparse; use torch.optim.SparseAdam "
            "for it, or sparse=False"
        )
    return PrecisionError(
        f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} was given for a "
        f"parameter of shape {shape}; allowed: its own shape in fp32, bf16 or fp16"
    )
