"""Names of an optimizer's tensors for messages, and refusals of those in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.border import require
from halfstep.precision.checks import some
from halfstep.precision.policy.policy import dtype_name

Names = Mapping[Tensor, str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""The accepted forms: ``model.named_parameters()``, a dict of it, or the inverse dict."""


def name_table(names: Names | None) -> dict[Tensor, str]:
    """A dict from parameter to name, made from any of the accepted forms."""
    where, allowed = "names", "model.named_parameters(), or a dict of it"
    if names is not None:
        require(names, Iterable, where, allowed)
    pairs: Iterable[tuple[Any, Any]] = names.items() if isinstance(names, Mapping) else names or ()
    table: dict[Tensor, str] = {}
    for pair in pairs:
        first, second = require(pair, tuple, where, allowed)
        name, parameter = (first, second) if isinstance(first, str) else (second, first)
        if not isinstance(name, str) or not isinstance(parameter, Tensor):
            raise PrecisionError(
                f"names holds a {type(first).__name__} with a {type(second).__name__}; allowed: "
                "pairs of name and parameter, as model.named_parameters() gives them"
            )
        table[parameter] = name
    return table


def owned(*optimizers: Optimizer) -> list[Any]:
    """All parameters of some optimizers, in order."""
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def with_gradients(*optimizers: Optimizer) -> list[Tensor]:
    """The tensors of some optimizers that have a gradient."""
    return [p for p in owned(*optimizers) if isinstance(p, Tensor) and p.grad is not None]


def parameter_names(optimizer: Optimizer, known: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """A name for every tensor of the optimizer: from ``known``, its groups, or its position."""
    table: dict[Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or ()  # made from model.named_parameters()
        for index, parameter in enumerate(group["params"]):
            place = f"group {number}, tensor {index} of shape {tuple(parameter.shape)}"
            name = own[index] if index < len(own) else place
            table.setdefault(parameter, known.get(parameter, name))
    return table


def accepts_low_precision(optimizer: Optimizer) -> bool:
    """Whether the optimizer declares that it accepts 16-bit gradients."""
    return bool(getattr(optimizer, "accepts_low_precision_gradients", False))


def refuse_half(
    optimizer: Optimizer, found: Iterable[Tensor], known: Mapping[Tensor, str], what: str
) -> None:
    """Raise for fp16 tensors; the error names them, the remedies and their costs."""
    half = [*dict.fromkeys(found)]
    if not half:
        return
    names = parameter_names(optimizer, known)
    count = sum(parameter.numel() for parameter in half)
    held = tuple(names[parameter] for parameter in half)
    raise PrecisionError(
        f"{what}: {len(half)} of {len(names)} tensors of {type(optimizer).__name__} are trained in "
        f"fp16: {some(held)}. Unscaling in fp16 would lose what the loss scale saved. Keep the "
        f"trainable weights in fp32: parameter.float(), or scaler.upcast_trainable_(optimizer), "
        f"costs {count * 2} bytes more, and as much for their gradients; or use "
        "halfstep.Precision with policy fp16-master"
    )


def refuse_pure(optimizer: Optimizer, known: Mapping[Tensor, str]) -> None:
    """Raise for trainable 16-bit weights whose small updates would be lost.

    Optimizers with ``accepts_low_precision_gradients = True`` pass, halfstep's among them: those
    keep small updates, or were given ``update="nearest"``.
    """
    if not accepts_low_precision(optimizer):
        names = parameter_names(optimizer, known)
        refuse_pure_weights(type(optimizer).__name__, names)


def refuse_pure_weights(kind: str, names: Mapping[Tensor, str]) -> None:
    """Like :func:`refuse_pure`, for an optimizer not made yet, of which ``kind`` is the name."""
    low = low_trainable(names)
    if not low:
        return
    count = sum(parameter.numel() for parameter in low)
    held = some(tuple(names[parameter] for parameter in low))
    dtypes = " and ".join(sorted({dtype_name(p.dtype) for p in low}))
    raise PrecisionError(
        f"{len(low)} of {len(names)} tensors of {kind} are trained in {dtypes} with nothing behind "
        f"them, so updates below half the gap between two such numbers are lost: {held}. Keep them "
        f"in fp32 with model.float() before the optimizer is made ({2 * count} bytes more, and as "
        f"much for the gradients and for each moment), use halfstep.optim.AdamW(..., "
        f"update='split') with bf16 weights ({2 * count} bytes more), or say allow_pure=True"
    )


def low_trainable(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The trainable parameters in 16 bits."""
    return [p for p in parameters if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
