"""A GradScaler for the loops of Accelerate and the Transformers Trainer.

They call ``step`` and ``update`` separately for each optimizer, and consider a step skipped if
``optimizer.step`` was not called. :class:`LoopScaler` works with both::

    step      one flag: is any gradient not finite, on any rank?
              yes: the optimizer is not called, fused or not; no: as torch's
    update    adapt the scale, and move the gradients of an optimizer that has not stepped to it

torch's scaler considers ``update`` the end of an iteration. With two optimizers the second one's
gradients would then be divided by a scale that they were not multiplied by, or divided twice if
they were clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.integrations.grad_scaler import GradScaler
from halfstep.integrations.optimizer_tensors import (
    name_table,
    stored_gradients,
    with_gradients,
)
from halfstep.precision.checks import some
from halfstep.precision.scaling.gradients import NonFinite, OneRank

Named = Callable[[], Iterable[tuple[str, Tensor]]]


class LoopScaler(GradScaler):
    """A :class:`halfstep.GradScaler` that never calls the optimizer on a skipped step.

    Reading the flag makes the host wait once per step, for fused optimizers too, since a loop that
    holds its learning rate on skipped steps must know. Names of parameters are those that this rank
    found.
    """

    _as_torch: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._optimizers: Callable[[], Sequence[Optimizer]] | None = None
        self._find_names: Named | None = None
        self._mixed: set[int] = set()  # ids: a backward came after their gradients were unscaled
        self._losses_sum: Tensor | None = None  # of the micro-batches since the last update

    def bind(self, optimizers: Callable[[], Sequence[Optimizer]], named: Named) -> None:
        """Bind the scaler to a loop.

        Args:
            optimizers: A function that returns the loop's optimizers, unwrapped.
            named: A function that returns names and parameters, if none were given.
        """
        self._optimizers = optimizers
        self._find_names = None if self._names else named

    @property
    def skipped_total(self) -> int:
        """Number of iterations with a skipped step, including those before a resume."""
        return int(self._skipped) + any(step.skipped for step in self._round)

    def release(self) -> None:
        """Forget the current iteration, and drop all references to optimizers and parameters."""
        self._mixed.clear()
        self._per_optimizer_states.clear()
        self._round, self._nonfinite, self._losses_sum = [], {}, None
        if self._find_names is not None:
            self._names = {}

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale like torch's."""
        states = self._per_optimizer_states.items()
        self._mixed |= {key for key, s in states if s["stage"] is OptState.UNSCALED}
        scaled = super().scale(outputs)
        bound = self._bound()
        if bound and not with_gradients(*bound):
            self._losses_sum = None  # earlier gradients were cleared, so their losses do not count
        if isinstance(outputs, Tensor) and outputs.numel() == 1:
            value = outputs.detach().float().reshape(())
            present = self._losses_sum
            self._losses_sum = value if present is None else present + value
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once a step; as torch's.

        Raises:
            PrecisionError: If a backward has added scaled gradients to unscaled ones.
        """
        if self._find_names is not None and not self._names:
            self._names = name_table(self._find_names())
        self._refuse_mixed(optimizer)
        super().unscale_(optimizer)

    def unscale_all_(self) -> None:
        """Unscale the gradients of all optimizers that have some and wait for their step."""
        for optimizer in self._bound():
            self._refuse_mixed(optimizer)
            if self._stage(optimizer) is OptState.READY and with_gradients(optimizer):
                self.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless a gradient is not finite on any rank; ``optimizer.step`` is not called then.

        Raises:
            PrecisionError: If a closure is given, or a backward has added scaled gradients to
                unscaled ones, or another rank's optimizer has no gradient.
        """
        if self._enabled and any(a is not None for a in (*args[:1], kwargs.get("closure"))):
            raise PrecisionError(
                "a closure was given to step(): its gradients would not be unscaled. Call "
                "backward and then step() without one"
            )
        self._refuse_mixed(optimizer)
        one: Any = optimizer
        heeds = getattr(one, "_step_supports_amp_scaling", False)
        one._step_supports_amp_scaling = False  # or torch would call it on an overflow, too
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            one._step_supports_amp_scaling = heeds

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, or set it; gradients of optimizers that have not stepped follow it.

        Raises:
            NonFiniteError: As :meth:`halfstep.GradScaler.update`.
        """
        waiting = {
            other: self._stage(other) is OptState.UNSCALED
            for other in self._bound()
            if self._stage(other) is not OptState.STEPPED and with_gradients(other)
        }
        for other in waiting:
            self._per_optimizer_states.pop(id(other), None)
            self._nonfinite.pop(id(other), None)
        self._mixed.clear()
        before = self.get_scale() if waiting else 1.0
        try:
            super().update(new_scale)
        finally:
            self._losses_sum = None
            for other, unscaled in waiting.items():
                factor = self.get_scale() / (1.0 if unscaled else before)
                if factor != 1.0:
                    for _, values in stored_gradients(other):
                        values.mul_(factor)

    def _bound(self) -> Sequence[Optimizer]:
        return () if self._optimizers is None else self._optimizers()

    def _stage(self, optimizer: Optimizer) -> OptState:
        state = self._per_optimizer_states.get(id(optimizer))
        stage: OptState = OptState.READY if state is None else state["stage"]
        return stage

    def _refuse_mixed(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._mixed and self._stage(optimizer) is OptState.UNSCALED:
            raise PrecisionError(
                f"a backward came after the gradients of {type(optimizer).__name__} were unscaled: "
                "they are partly scaled now. With gradient accumulation, clip and unscale after "
                "the last micro-batch only (if accelerator.sync_gradients), and step then"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling, without the loop that the scaler is bound to."""
        unbound: dict[str, Any] = {"_optimizers": None, "_find_names": None, "_mixed": set()}
        return super().__getstate__() | unbound


class FiniteGuard(LoopScaler):
    """Checks loss and gradients before a step, for loops that need no loss scale: bf16, fp32.

    It takes the place of a loop's loss scaler, with a constant scale of 1. What remains of a scaler
    is the check whether anything is not finite, on any rank: the run stops with the cause, and the
    weights are those before the step. The options are those of :class:`halfstep.GradScaler`.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, 1.0, **options)
        self._bounds = 1.0, 1.0

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless something is not finite on any rank; without gradients, as without a guard.

        Raises:
            PrecisionError: If a closure is given, or another rank's optimizer has no gradient.
        """
        if not with_gradients(optimizer) and isinstance(self._agreeing(optimizer), OneRank):
            value: float | None = optimizer.step(*args, **kwargs)
            return value
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Act on what the steps have found; do nothing if no optimizer had a gradient.

        Raises:
            NonFiniteError: If something was not finite.
        """
        if new_scale is not None or self._per_optimizer_states:
            super().update(new_scale)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self._losses_sum is not None:  # the flag starts from it
            found_inf.copy_(~self._losses_sum.isfinite())
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _stop(self, found: NonFinite) -> None:
        loss = self._losses_sum
        if loss is None:
            loss = torch.zeros((), device=self._device)
        of_loss = self._agreeing(*self._bound()).of_loss(loss)
        if of_loss:
            what = f"{of_loss}: the forward pass or the data made it"
        else:
            whose = some(found.names) or "parameters that are not known here"
            what = f"{found.what} in the gradients of {whose} under a finite loss"
        raise NonFiniteError(
            f"{what}; the step was not taken, the weights are unchanged. There is no loss scale "
            "to lower\ntry: print(halfstep.first_cause(model, your_loss, batch))",
            cause="forward" if of_loss else "gradients",
            parameters=() if of_loss else found.names,
        )
