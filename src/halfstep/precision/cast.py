"""Cast values and modules between formats."""

from __future__ import annotations

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
    if isinstance(value, Mapping):
        items = {key: cast_floating(item, dtype) for key, item in value.items()}
        if dataclasses.is_dataclass(value):  # a transformers ModelOutput is both
            return type(value)(**items)
        return type(value)(items)  # type: ignore[call-arg]
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


def cast_at_border(module: nn.Module, policy: PrecisionPolicy) -> list[RemovableHandle]:
    """Make a module with 16-bit weights take and give what its callers are used to.

    Floating inputs of ``module(...)`` are cast to the compute dtype and floating outputs to the
    output dtype (fp32), so that a loss written for fp32 stays an fp32 island.

    Returns:
        The two hooks' handles; ``remove()`` undoes each.
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cast_floating(args, policy.compute_dtype), cast_floating(
            kwargs, policy.compute_dtype
        )

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return cast_floating(output, policy.output_dtype)

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]
