"""An optimizer's tensors: their names for messages, refusals of 16 bits, and this rank's parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import local_gradient, local_part
from halfstep.precision.policy.policy import dtype_name

Names = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""The accepted forms: ``model.named_parameters()``, or a dict of it."""


def name_table(names: Names | None) -> dict[Tensor, str]:
    """Make a dict from parameter to name from either accepted form."""
    try:
        return {parameter: name for name, parameter in dict(names or ()).items()}
    except (TypeError, ValueError):  # dict() of something else
        raise PrecisionError(
            f"names={names!r}; allowed: model.named_parameters(), or a dict of them"
        ) from None


def owned(*optimizers: Optimizer) -> list[Any]:
    """List all parameters of some optimizers, in order."""
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def with_gradients(*optimizers: Optimizer) -> list[Tensor]:
    """List the tensors of some optimizers that have a gradient."""
    return [p for p in owned(*optimizers) if isinstance(p, Tensor) and p.grad is not None]


def parameter_names(optimizer: Optimizer, known: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Name every tensor of the optimizer: from ``known``, its groups, or its position."""
    table: dict[Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or ()  # made from model.named_parameters()
        for index, parameter in enumerate(group["params"]):
            place = f"group {number}, tensor {index} of shape {tuple(parameter.shape)}"
            name = own[index] if index < len(own) else place
            table.setdefault(parameter, known.get(parameter, name))
    return table


def accepts_low_precision(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer declares that it accepts 16-bit gradients."""
    return bool(getattr(optimizer, "accepts_low_precision_gradients", False))


def refuse_pure(optimizer: Optimizer, known: Mapping[Tensor, str]) -> None:
    """Raise for trainable 16-bit weights whose small updates would be lost.

    Optimizers with ``accepts_low_precision_gradients = True`` pass, halfstep's among them: those
    keep small updates, or were given ``update="nearest"``.
    """
    names = parameter_names(optimizer, known)
    low = [p for p in names if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not low or accepts_low_precision(optimizer):
        return
    count = sum(parameter.numel() for parameter in low)
    held = some(tuple(names[parameter] for parameter in low))
    dtypes = " and ".join(sorted({dtype_name(p.dtype) for p in low}))
    raise PrecisionError(
        f"{len(low)} of {len(names)} tensors of {type(optimizer).__name__} are trained in {dtypes} "
        "with nothing behind them, so updates below half the gap between two such numbers are "
        f"lost: {held}. Keep them in fp32 with model.float() before the optimizer is made "
        f"({2 * count} bytes more, and as much for the gradients and for each moment), use "
        f"halfstep.optim.AdamW(..., update='split') with bf16 weights ({2 * count} bytes more), or "
        "say allow_pure=True"
    )


def stored_gradients(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """List each parameter that has a gradient, with the values that this rank stores of it."""
    every = ((p, p.grad) for p in with_gradients(optimizer))
    return [(p, g._values() if g.is_sparse else local_part(g)) for p, g in every if g is not None]


def local_gradients(optimizer: Optimizer) -> Any:
    """A stand-in for an optimizer whose gradients are this rank's parts, for torch's check.

    torch's check refuses lists that mix plain tensors with DTensors, as a tensor-parallel plan
    leaves them. It works element-wise, so this rank's parts will do. They share memory with the
    gradients, which are first redistributed like their parameters: partial sums could still
    overflow when they are added up.
    """
    carriers = []
    for parameter in with_gradients(optimizer):
        gradient: Any = local_gradient(parameter)
        carriers.append(gradient.detach().requires_grad_())
        carriers[-1].grad = gradient
    return SimpleNamespace(param_groups=[{"params": carriers}])
