"""The result of one optimizer step: what it really did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["overflow", "nan_gradients", "nonfinite_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did; it holds for fused, foreach and loop optimizers alike."""

    applied: bool
    """Whether the weights were updated."""
    reason: Reason | None = None
    """Why it was skipped: ``"overflow"`` (infinities in the scaled gradients), ``"nan_gradients"``
    (NaN and no infinity), ``"nonfinite_loss"`` (the loss itself; only where ``on_nonfinite`` lets
    training continue), or None if it was applied."""
    loss: float
    """Sum of the losses given to ``backward`` since the last step, unscaled."""
    grad_norm: float
    """Global 2-norm of the unscaled gradients before clipping; not finite where they are not."""
    loss_scale: float
    """The loss scale of this step's backward."""
    next_loss_scale: float
    """The scale after this step."""
    skipped_total: int
    """Skipped steps so far, this one included."""
    skipped_in_a_row: int
    """Consecutive skipped steps that end with this one; 0 if it was applied."""
    calibrating: bool = False
    """Whether a dynamic scale is still searching for its level, because no step has been applied
    yet; a skip is expected then."""
    rolled_back: bool = False
    """Whether weights and optimizer state went back to an earlier step's."""
    nonfinite_parameters: tuple[str, ...] = ()
    """Parameters whose gradients were not finite, NaN first."""
