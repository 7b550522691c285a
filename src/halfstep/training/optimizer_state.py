"""An optimizer's state as tensors by name, and back, in the formats of another policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.state import CODES, REMAINDER, in_dtype


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, Tensor]:
    """The optimizer's state as ``"NAME/KEY"`` to tensor, without what the weights hold already.

    8-bit codes stand under the moment's own name: a checkpoint's file tells them by their dtype.
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
    """The state that :func:`optimizer_tensors` saved, in this optimizer's formats.

    Each tensor comes to its parameter's device, and moments of another format are converted;
    ``Optimizer.load_state_dict`` would cast all of them to the parameter's dtype, this keeps bits.

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
    """Take converted states; remainders, which belong to the weights, stay."""
    held = {p: state[REMAINDER] for p, state in optimizer.state.items() if REMAINDER in state}
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for parameter, remainder in held.items():
        optimizer.state[parameter][REMAINDER] = remainder
