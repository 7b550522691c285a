"""What one optimizer step really did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["overflow", "nan_gradients", "nonfinite_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did; right for fused, foreach and loop optimizers alike."""

    applied: bool
    """Whether the weights were updated."""
    reason: Reason | None = None
    """Why not: ``"overflow"`` (infinities in the scaled gradients), ``"nan_gradients"`` (NaN and no
    infinity), ``"nonfinite_loss"`` (the loss itself; only where ``on_nonfinite`` allows to go on),
    or None."""
    loss: float
    """Sum of the losses given to ``backward`` since the last step, unscaled."""
    grad_norm: float
    """Global 2-norm of the unscaled gradients before clipping; not finite where they are not."""
    loss_scale: float
    """The scale that this step's gradients carried."""
    next_loss_scale: float
    """The scale after this step."""
    skipped_total: int
    """Skipped steps so far, this one included."""
    skipped_in_a_row: int
    """Consecutive skipped steps that end with this one; 0 if it was applied."""
    calibrating: bool = False
    """Whether a dynamic scale is still looking for its level: no step has been applied yet. A skip
    is expected then."""
    rolled_back: bool = False
    """Whether weights and optimizer state went back to an earlier step's."""
    nonfinite_parameters: tuple[str, ...] = ()
    """Parameters whose gradients were not finite, NaN first."""
