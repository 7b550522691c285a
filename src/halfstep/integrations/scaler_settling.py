"""The end of a step with a loss scaler: a broken loss stops the run with its cause."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import ConfigError, NonFiniteError
from halfstep.integrations.grad_scaler import GradScaler
from halfstep.precision.ranks import ranks_of_this_process


def own_scaler(scaler: GradScaler | None, device: str | None) -> GradScaler:
    """The scaler that was given, or one with ``strict=True``.

    Raises:
        ConfigError: If it is not halfstep's, or is for another device.
    """
    if scaler is None:
        return GradScaler("cuda" if device is None else device, strict=True)
    if not isinstance(scaler, GradScaler):
        raise ConfigError(
            f"scaler is a {type(scaler).__name__}; allowed: halfstep.GradScaler. For torch's own "
            "use Lightning's MixedPrecision"
        )
    if device not in (None, scaler._device):
        raise ConfigError(
            f"the scaler was made for {scaler._device!r} and the plugin for {device!r}; give "
            f"GradScaler({device!r}, ...), or leave device out"
        )
    return scaler


def broken_loss(scaler: GradScaler, loss: Tensor | None) -> NonFiniteError | None:
    """The error for a step that was skipped because its loss was not finite, or None.

    All ranks must call it together: an overflow in one rank's gradients is in everybody's.

    Args:
        scaler: After ``step``, before ``update``.
        loss: This rank's, summed over micro-batches; None if it is not known.
    """
    result = scaler.last_step
    if result is None or result.applied:
        return None
    mine = loss is not None and not bool(loss.isfinite().all())
    device = torch.device(scaler._device)
    if not any(ranks_of_this_process(device).worst([int(mine)])):
        return None
    shown = f"{loss.tolist()}" if mine and loss is not None else "not finite on another rank"
    return NonFiniteError(
        f"the loss is {shown} before any gradient: the forward pass or the data made it, no loss "
        "scale can help; the weights are unchanged",
        cause="forward",
    )


def settle(scaler: GradScaler, loss: Tensor | None) -> None:
    """Adapt the scale, and stop for a loss that is not finite rather than for what follows.

    Raises:
        NonFiniteError: As :func:`broken_loss` tells, or as :meth:`GradScaler.update`.
    """
    error = broken_loss(scaler, loss)
    try:
        scaler.update()
    except NonFiniteError:
        if error is None:
            raise
    if error is not None:
        raise error
