"""What a checkpoint holds as named tensors, and back in the formats of another policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.state import CODES, REMAINDER, in_dtype
from halfstep.trainer.checkpoint.store import Checkpoint

AVERAGE, BUFFER = "ema", "buffer"
"""The KEY in ``NAME/KEY`` of tensors saved beside the optimizer's: averaged weights, buffers."""
EXPORTED = (AVERAGE, BUFFER)
"""What :func:`exported` needs of a checkpoint, besides its weights."""


class Exported(NamedTuple):
    """The exportable part of a checkpoint, by name: fp32 weights and the modules' buffers."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def by_kind(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Split a checkpoint's tensors into moments by path, and averages and buffers by name."""
    moments: dict[str, Tensor] = {}
    others: dict[str, dict[str, Tensor]] = {AVERAGE: {}, BUFFER: {}}
    for path, tensor in tensors.items():
        name, _, kind = path.rpartition("/")
        if kind in others:
            others[kind][name] = tensor
        else:
            moments[path] = tensor
    return moments, others[AVERAGE], others[BUFFER]


def exported(checkpoint: Checkpoint) -> Exported:
    """Return a checkpoint's weights for export: their averages, where the run kept some."""
    _, averages, buffers = by_kind(checkpoint.optimizer)
    weights = {name: averages.get(name, w).float() for name, w in checkpoint.weights.items()}
    return Exported(weights, buffers)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, Tensor]:
    """Return the optimizer's state as ``"NAME/KEY"`` to tensor, without the weights' remainders.

    8-bit codes have the moment's own name: in a checkpoint's file their dtype tells them apart.
    """
    return {
        f"{names[parameter]}/{key.removesuffix(CODES)}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if key != REMAINDER
    }


def convert_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: dict[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    """Convert the state that :func:`optimizer_tensors` saved to this optimizer's formats.

    Each tensor moves to its parameter's device, and only moments in another format are converted;
    ``Optimizer.load_state_dict`` would cast all of them to the parameter's dtype and lose bits.

    Raises:
        PrecisionError: If a moment is missing or of another shape.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    saved: dict[nn.Parameter, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = parameters[name]
        # A fused AdamW keeps its step counter beside the parameter, as it keeps the moments.
        saved.setdefault(parameter, {})[key] = tensor.to(parameter.device)
    if isinstance(optimizer, LowPrecisionOptimizer):
        return {
            parameter: optimizer.convert(parameter, state) for parameter, state in saved.items()
        }
    return {parameter: in_dtype(state, parameter.dtype) for parameter, state in saved.items()}


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, states: Mapping[Tensor, dict[str, Any]]
) -> None:
    """Set converted states, but keep the current remainders, which belong to the weights."""
    held = {p: state[REMAINDER] for p, state in optimizer.state.items() if REMAINDER in state}
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for parameter, remainder in held.items():
        optimizer.state[parameter][REMAINDER] = remainder
