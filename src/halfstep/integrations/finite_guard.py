"""The look at loss and gradients before a step, for loops that need no loss scale: bf16, fp32.

It stands where a loop keeps its loss scaler, with a scale that is 1 and stays 1. What remains of a
scaler is the question whether anything is not finite, and its answer::

    a loss or a gradient is not finite, on any rank
        on_nonfinite="stop"     raise, with the cause; the weights are those before the step
        on_nonfinite="skip:K"   leave up to K such steps in a row out
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.integrations.loop_scaler import LoopScaler, has_gradients
from halfstep.integrations.parameter_names import Names
from halfstep.integrations.scale_guard import Guard
from halfstep.precision.checks import some
from halfstep.precision.nonfinite import OnNonFinite
from halfstep.precision.ranks import OneRank, Ranks
from halfstep.precision.result import Reason


class FiniteGuard(LoopScaler):
    """:class:`LoopScaler` without a scale: it multiplies by 1, and stops or skips.

    Args:
        device: As torch's scaler.
        on_nonfinite: ``"stop"`` or ``"skip:K"``.
        names: For messages; None: the prepared models' own.
        ranks: Who must agree; None: the default group where there is one.
        allow_pure: As :class:`halfstep.GradScaler`.

    Raises:
        PrecisionError: For another ``on_nonfinite``.
    """

    def __init__(
        self,
        device: str,
        *,
        on_nonfinite: str = "stop",
        names: Names | None = None,
        ranks: Ranks | None = None,
        allow_pure: bool = False,
    ) -> None:
        self._choice = OnNonFinite.parse(on_nonfinite)
        if self._choice.action == "rollback":
            raise PrecisionError(
                f"on_nonfinite={on_nonfinite!r} keeps copies of model and optimizer, which "
                "halfstep.Precision does; allowed here: stop, skip:K"
            )
        super().__init__(
            device, 1.0, min_scale=1.0, max_scale=1.0, names=names, ranks=ranks,
            allow_pure=allow_pure,
        )  # fmt: skip
        self._losses_sum: Tensor | None = None  # of the micro-batches since the last update
        self._said = False

    def scale(self, outputs: Any) -> Any:
        """The outputs times 1; a scalar is remembered as the loss of a micro-batch."""
        scaled = super().scale(outputs)
        bound = self._bound()
        if bound and not any(map(has_gradients, bound)):
            self._losses_sum = None  # what was back-propagated before has been dropped
        if isinstance(outputs, Tensor) and outputs.numel() == 1:
            value = outputs.detach().float().reshape(())
            present = self._losses_sum
            self._losses_sum = value if present is None else present + value
        return scaled

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless something is not finite on any rank; without gradients, as without a guard.

        Raises:
            PrecisionError: If a closure is given, or another rank's optimizer has no gradient.
        """
        device = torch.device(self._device)
        if not has_gradients(optimizer) and isinstance(self._agreeing(device), OneRank):
            value: float | None = optimizer.step(*args, **kwargs)
            return value
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Settle what the steps have found; nothing, where nothing had a gradient.

        Raises:
            NonFiniteError: As ``on_nonfinite`` says.
        """
        if new_scale is not None or self._per_optimizer_states:
            super().update(new_scale)

    def for_loss(self, name: str) -> Self:
        """This one: a scale of 1 serves every loss."""
        return self

    def abandon(self) -> None:
        """Forget the iteration that has begun, of a loop that was left by an error."""
        super().abandon()
        self._losses_sum = None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self._losses_sum is not None:  # the flag starts from it
            found_inf.copy_(~self._losses_sum.isfinite())
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _settle(self) -> None:
        try:
            super()._settle()
        finally:
            self._losses_sum = None

    def _stop_if_hopeless(
        self, guard: Guard, reason: Reason, names: tuple[str, ...], scale: float, *, at_floor: bool
    ) -> None:
        loss = self._losses_sum
        mine = loss is not None and not bool(loss.isfinite())
        device = torch.device(self._device) if loss is None else loss.device
        of_loss = bool(self._agreeing(device).worst([int(mine)])[0])
        if of_loss:
            shown = f"{loss.item()}" if mine and loss is not None else "not finite on another rank"
            what = f"the loss is {shown}: the forward pass or the data made it"
        else:
            kind = "NaN" if reason == "nan_gradients" else "overflow (inf)"
            whose = some(names) or "parameters that are not known here"
            what = f"{kind} in the gradients of {whose} under a finite loss"
        if self._choice.action == "skip" and self._count.in_a_row <= self._choice.count:
            self._say(what)
            return
        raise NonFiniteError(
            f"{what}; the step was not taken, the weights are unchanged. There is no loss scale "
            "to lower: look for the cause with halfstep.trace_nonfinite",
            cause="forward" if of_loss else "gradients",
            parameters=() if of_loss else names,
        )

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"the step is left out, as on_nonfinite={self._choice} allows: {what}. Said once; "
                "last_step tells of every step",
                stacklevel=7,
            )
