"""The result of one optimizer step: what it really did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

Reason = Literal["overflow", "nan_gradients", "nonfinite_loss", "loss_spike", "gradient_spike"]


class _ReadLater:
    """A dataclass whose fields may be read from the device at the first access to one of them."""

    __slots__ = ("_read",)

    @classmethod
    def later(cls, read: Callable[[], Self]) -> Self:
        """An instance whose fields are those of ``read()``, called once any is asked for."""
        made = object.__new__(cls)
        object.__setattr__(made, "_read", read)
        return made

    if not TYPE_CHECKING:  # a misspelt field stays an error of the type checker

        def __getattr__(self, name: str) -> Any:
            """Read all fields; Python calls this for a field that is not set."""
            if name not in self.__slots__:
                raise AttributeError(f"{type(self).__name__} has no field {name!r}")
            known = self._read()
            for each in fields(known):
                object.__setattr__(self, each.name, getattr(known, each.name))
            return getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(_ReadLater):
    """What one optimizer step did; it holds for fused, foreach and loop optimizers alike.

    After a step that was decided on a GPU the fields are not known on the host yet. The first
    access to one of them waits for that step, and raises the ``NonFiniteError`` that it ended with.
    """

    applied: bool
    """Whether the weights were updated."""
    reason: Reason | None = None
    """Why it was skipped: ``"overflow"`` (infinities in the scaled gradients), ``"nan_gradients"``
    (NaN and no infinity), ``"nonfinite_loss"`` (the loss itself; only where ``on_nonfinite`` lets
    training continue), ``"loss_spike"`` or ``"gradient_spike"`` (finite, but far above the steps
    before; only with ``on_spike``), or None if it was applied."""
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
    nonfinite_parameters: tuple[str, ...] = ()
    """Parameters whose gradients were not finite, NaN first."""
