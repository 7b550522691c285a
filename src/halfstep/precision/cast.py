"""Cast values and modules between formats."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.precision.policy import PrecisionPolicy


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside ``value``; leave all else as it is.

    Args:
        value: A tensor, or lists, tuples (named too), mappings and dataclasses of such, nested.
        dtype: The floating dtype to cast to.

    Returns:
        The same structure. Tensors that have the dtype already are the same objects.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if isinstance(value, dict):  # a copy keeps what a subclass holds besides its items
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = cast_floating(item, dtype)
        return result
    if isinstance(value, Mapping):
        return type(value)({k: cast_floating(item, dtype) for k, item in value.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: cast_floating(getattr(value, name), dtype) for name in names}
        )
    return value


@torch.no_grad()
def cast_parameters_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating parameter in place: the Parameter objects stay the same.

    Buffers keep their dtype: tables and running statistics lose their meaning in 16 bits.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class CastInputs:
    """A forward pre-hook: floating inputs of a module with 16-bit weights to the compute dtype."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the arguments to call the module with."""
        dtype = self.policy.compute_dtype
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)


class CastOutputs:
    """A forward hook: floating outputs to the output dtype, fp32, so that the loss is an island."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Give the output to return to the caller."""
        return cast_floating(output, self.policy.output_dtype)


def cast_at_border(module: nn.Module, policy: PrecisionPolicy) -> list[RemovableHandle]:
    """Make ``module(...)`` take and give what its callers are used to: fp32 comes out.

    Returns:
        The hooks' handles; ``remove()`` undoes each.
    """
    handles = []
    if policy.param_dtype != torch.float32:
        handles.append(module.register_forward_pre_hook(CastInputs(policy), with_kwargs=True))
    if policy.compute_dtype != torch.float32:
        handles.append(module.register_forward_hook(CastOutputs(policy)))
    return handles
