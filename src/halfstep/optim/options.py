"""What a parameter group's options mean, and the checks that an optimizer makes before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.storage.moments import Moments, moments_format
from halfstep.optim.storage.state import stored_moment
from halfstep.precision.masters.rounding import ROUNDING, Update


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


# Checks that an optimizer makes before anything is changed.


_WEIGHTS = (torch.float32, torch.bfloat16)
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def check_group(group: dict[str, Any], owner: str) -> None:
    """Refuse unknown or unsupported options, and parameters of unsupported dtype or strides."""
    for key, allowed in (("update", get_args(Update)), ("moments", get_args(Moments))):
        if group[key] is not None and group[key] not in allowed:
            raise PrecisionError(f"{key}={group[key]!r}; allowed: {', '.join(allowed)}")
    _check_options(group, owner)
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


def _check_options(group: dict[str, Any], owner: str) -> None:
    """Refuse options of ``torch.optim`` that no kernel honours, partly with torch's messages."""
    if group.get("fused") and group.get("differentiable"):
        raise RuntimeError("`fused` does not support `differentiable`")
    if group.get("fused") and group.get("foreach"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    rate = group.get("lr")
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        raise PrecisionError(
            f"lr is a tensor on {rate.device}, which every step would have to wait for; give a "
            "number or a CPU tensor"
        )
    if group.get("amsgrad"):
        raise PrecisionError(
            f"amsgrad=True needs a third moment, and halfstep.optim.{owner} keeps two; use "
            "torch.optim.AdamW(amsgrad=True), for 16-bit weights under policy bf16-master"
        )
    if group.get("capturable"):
        raise PrecisionError(
            f"capturable=True: {owner}.step counts steps on the host, which a CUDA graph would "
            "repeat; leave capturable out, and the step out of the graph"
        )
    if group.get("differentiable"):
        raise PrecisionError(
            f"differentiable=True: {owner}'s kernels write weights behind autograd's back; use "
            "one of torch.optim for a step to differentiate through"
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


# Checks that an optimizer makes of its own arguments.


def check_rate(lr: float | Tensor, foreach: bool | None = None, capturable: bool = False) -> None:
    """Refuse the learning rates that ``torch.optim`` refuses, with its messages."""
    if isinstance(lr, Tensor):
        if foreach and not capturable:
            raise PrecisionError(
                "lr as a Tensor is not supported for capturable=False and foreach=True; leave "
                "foreach out"
            )
        if lr.numel() != 1:
            raise PrecisionError(
                f"Tensor lr must be 1-element; this one has shape {tuple(lr.shape)}"
            )
    require_option(bool(lr >= 0), "learning rate", lr, "lr >= 0")


def checked_betas(
    betas: tuple[float | Tensor, float | Tensor], foreach: bool | None, capturable: bool
) -> tuple[float, float]:
    """The betas as numbers, as ``torch.optim`` stores them, after the checks that it makes."""
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise PrecisionError(f"Tensor betas[{index}] must be 1-element")
        require_option(
            bool(0 <= beta < 1), f"beta parameter at index {index}", beta, "betas: 0 <= beta < 1"
        )
    tensors = [isinstance(beta, Tensor) for beta in betas]
    if any(tensors) and not all(tensors):
        raise PrecisionError("betas must be either both floats or both Tensors")
    if any(tensors) and foreach and not capturable:
        raise PrecisionError(
            "betas[0] as a Tensor is not supported for capturable=False and foreach=True; leave "
            "foreach out"
        )
    for beta in betas:
        if isinstance(beta, Tensor) and beta.device.type != "cpu":
            raise PrecisionError(
                f"betas are tensors on {beta.device}, which the host would have to wait for; give "
                "numbers or CPU tensors"
            )
    return float(betas[0]), float(betas[1])


def require_option(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise unless ``holds``; the message begins like ``torch.optim``'s, which programs match."""
    if not holds:
        raise PrecisionError(f"Invalid {name}: {value}; allowed: {allowed}")
