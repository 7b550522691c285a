"""What a parameter group's options mean, and what is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.moments import Moments, moments_format
from halfstep.optim.state import stored_moment
from halfstep.precision.masters.rounding import ROUNDING, Update

_WEIGHTS = (torch.float32, torch.bfloat16)
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def update_of(group: dict[str, Any], parameter: Tensor) -> Update:
    """The rounding mode of a group's parameter; fp32 weights need none, so "nearest"."""
    chosen: Update = group["update"] or "nearest"
    return chosen if parameter.dtype == torch.bfloat16 else "nearest"


def moments_of(group: Mapping[str, Any]) -> Moments:
    """The format of a group's moments."""
    chosen: Moments = group["moments"] or "fp32"
    return chosen


def kept_moments(
    names: Sequence[str], group: Mapping[str, Any], state: Mapping[str, Any]
) -> Moments:
    """The format of a parameter's moments, as its tensors show it; its group's before it has any.

    The group's is what new moments get: these may be older than it, or have fallen back to bf16.
    """
    stored = (stored_moment(state, name)[0] for name in names)
    dtypes = [values.dtype for values in stored if values is not None]
    return moments_format(dtypes[0]) if dtypes else moments_of(group)


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options with tensors, such as a learning rate, converted to numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }


def check_group(group: dict[str, Any], owner: str) -> None:
    """Refuse unknown or unsupported options, and parameters of unsupported dtype or strides."""
    for key, allowed in (("update", get_args(Update)), ("moments", get_args(Moments))):
        if group[key] is not None and group[key] not in allowed:
            raise PrecisionError(f"{key}={group[key]!r}; allowed: {', '.join(allowed)}")
    rate = group.get("lr")
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        raise PrecisionError(
            f"lr is a tensor on {rate.device}, which every step would have to wait for; give a "
            "number or a CPU tensor"
        )
    for key in ("amsgrad", "capturable", "differentiable"):
        if group.get(key):
            raise PrecisionError(
                f"{key}=True is not supported by halfstep.optim.{owner}; leave it out, or use "
                "torch.optim, for 16-bit weights under policy bf16-master"
            )
    for parameter in group["params"]:
        shape = tuple(parameter.shape)
        if parameter.dtype not in _WEIGHTS:
            raise PrecisionError(
                f"a parameter of shape {shape} is {parameter.dtype}; {owner} keeps fp32 and bf16 "
                f"weights. {_way_out(parameter.dtype, owner)}"
            )
        if any(n > 1 and stride == 0 for n, stride in zip(shape, parameter.stride(), strict=True)):
            raise PrecisionError(
                f"a parameter of shape {shape} and strides {parameter.stride()} has elements that "
                "share memory; give each element its own (parameter.data = parameter.data.clone())"
            )


def _way_out(dtype: torch.dtype, owner: str) -> str:
    """Advice for a parameter of an unsupported dtype."""
    theirs = f"torch.optim.{owner}" if hasattr(torch.optim, owner) else "one of torch.optim"
    if dtype.is_complex:
        return (
            "Its update rules are for real numbers: make the parameter "
            f"torch.view_as_real(value), or keep it complex with {theirs}"
        )
    if dtype == torch.float64:
        return (
            "Its steps are computed in fp32 and would round fp64 weights: keep them with "
            f"{theirs}, or call model.float() first"
        )
    return (
        "Call model.float() before you make it; halfstep.Precision with policy fp16-master then "
        "casts the model and gives it fp32 masters"
    )


def check_updates(groups: Sequence[dict[str, Any]], owner: str) -> None:
    """Refuse trainable bf16 weights in groups that give no rounding mode."""
    silent = [
        parameter
        for group in groups
        if group["update"] is None
        for parameter in group["params"]
        if parameter.dtype == torch.bfloat16 and parameter.requires_grad
    ]
    if silent:
        modes = ", ".join(f"{m.name!r} ({m.bytes})" for m in ROUNDING.values() if m.policy)
        raise PrecisionError(
            f"{len(silent)} trainable tensors are bf16 and nothing says how they keep small "
            f"updates: make {owner} with update={modes}, in brackets the bytes per parameter; "
            "'split' is exact, 'nearest' loses them"
        )


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that no kernel accepts: sparse, or of another shape or dtype."""
    shape = tuple(parameter.shape)
    if gradient.is_sparse:
        raise PrecisionError(
            f"the gradient of a parameter of shape {shape} is sparse; use torch.optim.SparseAdam "
            "for it, or sparse=False"
        )
    if gradient.shape != parameter.shape or gradient.dtype not in _GRADIENTS:
        raise PrecisionError(
            f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} was given for a "
            f"parameter of shape {shape}; allowed: its own shape in fp32, bf16 or fp16"
        )


def checked_betas(betas: tuple[float | Tensor, float | Tensor]) -> tuple[float, float]:
    """The betas as numbers, as ``torch.optim`` stores them."""
    for index, beta in enumerate(betas):
        require_option(
            bool(0 <= beta < 1), f"beta parameter at index {index}", beta, "betas: 0 <= beta < 1"
        )
    return float(betas[0]), float(betas[1])


def require_option(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise unless ``holds``; the message begins like ``torch.optim``'s, which programs match."""
    if not holds:
        raise PrecisionError(f"Invalid {name}: {value}; allowed: {allowed}")
