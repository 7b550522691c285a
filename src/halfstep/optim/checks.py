"""What an optimizer refuses, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.optim.kernel import is_dense
from halfstep.optim.moments import Moments
from halfstep.precision.policy import Update

_WEIGHTS = (torch.float32, torch.bfloat16)
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def check_group(group: dict[str, Any], owner: str) -> None:
    """Refuse options that are not there, and parameters that are not kept.

    Args:
        group: A parameter group.
        owner: The optimizer's name.

    Raises:
        PrecisionError: Naming what was found and what is allowed.
    """
    for key, allowed in (("update", get_args(Update)), ("moments", get_args(Moments))):
        if group[key] is not None and group[key] not in allowed:
            raise PrecisionError(f"{key}={group[key]!r}; allowed: {', '.join(allowed)}")
    for parameter in group["params"]:
        shape = tuple(parameter.shape)
        if parameter.dtype not in _WEIGHTS:
            raise PrecisionError(
                f"a parameter of shape {shape} is {parameter.dtype}; {owner} keeps fp32 and bf16 "
                "weights. Call model.float() before you make it; halfstep.Precision with policy "
                "fp16-master then casts the model and gives it fp32 masters"
            )
        if not is_dense(parameter):
            raise PrecisionError(
                f"a parameter of shape {shape} and strides {parameter.stride()} is part of a "
                "larger tensor; give it memory of its own "
                "(parameter.data = parameter.data.clone())"
            )


def check_updates(groups: Sequence[dict[str, Any]], owner: str) -> None:
    """Refuse bf16 weights of which nothing says how they keep small updates.

    Raises:
        PrecisionError: With the choices and their cost in bytes.
    """
    silent = [
        parameter
        for group in groups
        if group["update"] is None
        for parameter in group["params"]
        if parameter.dtype == torch.bfloat16 and parameter.requires_grad
    ]
    if silent:
        raise PrecisionError(
            f"{len(silent)} trainable tensors are bf16 and nothing says how they keep small "
            f"updates: make {owner} with update='split' (exact, 2 bytes per parameter), 'split24' "
            "(1 byte), 'kahan' (2 bytes) or 'stochastic' (0 bytes); update='nearest' loses them"
        )


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that no kernel takes.

    Raises:
        PrecisionError: Naming shape and dtype.
    """
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
