"""What a saved precision state must be to be taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.border import require
from halfstep.precision.local import local_part
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import DTYPES, PrecisionPolicy


def load_scale(loss_scale: LossScale, state: Mapping[str, Any], policy: str) -> bool:
    """Load a saved loss scale; another policy's is taken where it fits and else left alone.

    Returns:
        Whether it was taken.

    Raises:
        PrecisionError: If it is of the same policy and damaged; nothing is changed then.
    """
    try:
        loss_scale.load_state_dict(dict(state["loss_scale"]))
    except PrecisionError:
        if state["policy"] == policy:
            raise
        return False
    return True


def check_state(
    state: Mapping[str, Any],
    policy: PrecisionPolicy,
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """Refuse a saved precision state that is of another policy or model, or damaged.

    Args:
        state: What was saved.
        policy: What this run uses.
        parameters: What the optimizer updates, by name.
        weights: The saved model's weights, which allow another policy's state; or None.

    Returns:
        The masters to take, by name; none where the model's own weights are they.
    """
    counts = {"applied_total", "skipped_total", "skipped_in_a_row"}
    expected = {"policy", "loss_scale", *counts, "masters"}
    require(state, Mapping, "load_state_dict(state)", "what Precision.state_dict() gave")
    if weights is not None:
        require(weights, Mapping, "load_state_dict(weights)", "the model's state_dict(), or None")
    if set(state) != expected:
        raise PrecisionError(
            f"the saved precision state has keys {sorted(map(str, state))}, expected "
            f"{sorted(expected)}; allowed: what Precision.state_dict() gave"
        )
    if state["policy"] != str(policy) and weights is None:
        raise PrecisionError(
            f"the saved precision state is of policy {state['policy']!r}, this run uses "
            f"{str(policy)!r}; resume with --precision {state['policy']}, or give the saved "
            "model's weights= to change over"
        )
    for key in sorted(counts):
        count = state[key]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise PrecisionError(f"the saved precision state has {key}={count!r}: no count")
    for key in ("loss_scale", "masters"):
        if not isinstance(state[key], Mapping):
            raise PrecisionError(f"the saved precision state has {key}={state[key]!r}: no table")
    masters = dict(state["masters"])
    dtypes = {torch.float32}
    if weights is not None and not masters:
        masters = {name: local_part(w) for name, w in weights.items() if name in parameters}
        dtypes = set(DTYPES.values())
    elif not masters and not policy.keeps_more_than_weights:
        return {}
    saved = {name: _shape(tensor, dtypes) for name, tensor in masters.items()}
    if saved != {name: parameter.shape for name, parameter in parameters.items()}:
        odd = sorted(set(saved) ^ set(parameters)) or ["shapes or dtypes differ"]
        raise PrecisionError(f"saved master weights are of another model: {', '.join(odd[:5])}")
    return masters


def _shape(value: object, dtypes: set[torch.dtype]) -> object:
    """What a saved master is known by: its shape, or something that equals no shape."""
    return value.shape if isinstance(value, Tensor) and value.dtype in dtypes else type(value)
