"""What moves with the steps: learning-rate schedules, and the average of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.errors import PrecisionError
from halfstep.precision.border import require
from halfstep.precision.ema import EMA

OnSkip = Literal["hold", "advance"]


class AfterStep:
    """Schedules hold still on a skipped step or advance, as chosen; the average holds still."""

    def __init__(
        self,
        schedulers: Sequence[Any],
        on_skip: OnSkip,
        ema: EMA | None,
        names: Collection[str],
    ) -> None:
        """Check what is to be moved.

        Args:
            schedulers: Learning-rate schedulers.
            on_skip: What they do on a skipped step.
            ema: The average, or None.
            names: The trainable parameters of the model.

        Raises:
            PrecisionError: For an unknown word, what is no scheduler or one that wants a metric,
                or an average of another model.
        """
        if on_skip not in get_args(OnSkip):
            raise PrecisionError(f"on_skip={on_skip!r}; allowed: {', '.join(get_args(OnSkip))}")
        where, allowed = "Precision(schedulers)", "a list of torch's learning-rate schedulers"
        for scheduler in require(schedulers, (list, tuple), where, allowed):
            if not callable(getattr(scheduler, "step", None)):
                require(scheduler, LRScheduler, where, allowed)
            if isinstance(scheduler, ReduceLROnPlateau):
                raise PrecisionError(
                    "ReduceLROnPlateau wants a metric with each step; leave it out of schedulers= "
                    "and step it yourself where result.applied"
                )
        if ema is not None:
            require(ema, EMA, "Precision(ema)", "a halfstep.EMA of the model").require(names)
        self._schedulers = schedulers
        self._on_skip = on_skip
        self._ema = ema

    def require_own_weights(self) -> None:
        """Refuse to read or train weights while the averages stand in their places.

        Raises:
            PrecisionError: Inside of ``ema.applied_to(model)``.
        """
        if self._ema is not None and self._ema.applied:
            raise PrecisionError(
                "inside ema.applied_to(model) the model has averages for weights, which a step or "
                "a checkpoint would take for the trained ones. Leave the block first"
            )

    def __call__(self, applied: bool, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Move what moves.

        Args:
            applied: Whether the weights were updated.
            weights: Name and exact value; read only if there is an average to move.
        """
        if applied and self._ema is not None:
            self._ema.update_(weights, grow=True)
        if applied:
            for scheduler in self._schedulers:
                scheduler.step()
        elif self._schedulers and self._on_skip == "advance":
            with warnings.catch_warnings():
                # torch takes a schedule that moves on a skipped step for a wrong order of calls.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for scheduler in self._schedulers:
                    scheduler.step()
