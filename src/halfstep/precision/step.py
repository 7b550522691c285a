"""Precision: the object that a training loop holds.

One optimizer step, in this order (the order of Megatron-Core's mixed-precision optimizer)::

    backward   loss * scale, gradients add up over micro-batches (in fp32 masters where there are)
    check      one global norm in fp32; not finite: name the parameters, skip or stop
    update     gradients * (clip factor / scale); optimizer.step(); round masters into weights
    adapt      the loss scale backs off, holds or grows
    report     StepResult

The check runs in every precision and before anything is changed, so a skipped step leaves weights,
moments and step counters bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError
from halfstep.precision.after_step import AfterStep, OnSkip
from halfstep.precision.autocast import arithmetic, require_support
from halfstep.precision.calibrate import calibrated
from halfstep.precision.cast import around_model, cast_at_border
from halfstep.precision.checks import (
    WeightsLoaded,
    check_loss,
    check_max_norm,
    check_parameters,
    no_backward,
    one_device,
    stale_masters,
    upcast_trainable_,
)
from halfstep.precision.ema import EMA
from halfstep.precision.examiner import Examiner
from halfstep.precision.gradients import NonFinite, clip_factor
from halfstep.precision.local import local_part, reshard_
from halfstep.precision.loss_scale import make_loss_scale
from halfstep.precision.master_weights import make_masters
from halfstep.precision.nonfinite import Guard, OnNonFinite, broken_loss, incurable
from halfstep.precision.optimizer_masters import require_own_optimizer
from halfstep.precision.parse import parse_policy
from halfstep.precision.policy import PrecisionPolicy
from halfstep.precision.ranks import Ranks, ranks_of_this_process
from halfstep.precision.result import StepResult
from halfstep.precision.saved_state import check_state, load_scale
from halfstep.precision.wrappers import check_wrappers


class Precision:
    """Mixed-precision training in somebody's own loop, under one policy.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> precision = Precision("bf16-mixed", model, optimizer)
        >>> with precision.autocast():
        ...     loss = model(torch.ones(8, 4)).square().mean()
        >>> result = precision.step(loss, max_norm=1.0)
        >>> result.applied, result.loss_scale
        (True, 1.0)
    """

    def __init__(
        self,
        policy: str | PrecisionPolicy,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        on_nonfinite: str = "stop",
        schedulers: Sequence[Any] = (),
        on_skip: OnSkip = "hold",
        ema: EMA | None = None,
        upcast_trainable: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Check the policy against the device, and cast and copy weights where it says so.

        Args:
            policy: A policy, its name, field string or ``.toml`` file.
            model: On its final device. With 16-bit weights its floating parameters are cast in
                place, and ``model(...)`` casts floating inputs to the compute dtype and floating
                outputs to fp32.
            optimizer: One, or several that step together, over the model's parameters, none
                stepped yet. Any will do; ``bf16-split``, ``bf16-kahan``, ``bf16-sr`` and low
                ``moments`` need those of :mod:`halfstep.optim`. With a ``*-master`` policy the
                parameter groups get the fp32 masters instead.
            on_nonfinite: Where no loss scale can help: ``"stop"``, ``"skip:K"`` or ``"rollback:N"``
                (:class:`~halfstep.precision.nonfinite.OnNonFinite`).
            schedulers: Learning-rate schedulers, stepped here.
            on_skip: Whether they ``"hold"`` still on a skipped step or ``"advance"``.
            ema: Moved here after applied steps, towards the exact masters.
            upcast_trainable: Convert trainable 16-bit parameters to fp32 where the policy wants
                that, instead of refusing them; frozen ones stay as they are.
            ranks: Who must agree on each step; None: all of ``torch.distributed``'s default group
                where it is initialised. All must then call each method together.

        Raises:
            PrecisionError: If policy, device, model and optimizer do not go together; nothing has
                been changed then.
        """
        self.policy = parse_policy(policy)
        self.device = one_device(model)
        self.support = require_support(self.policy, self.device)
        self.loss_scale = make_loss_scale(self.policy.loss_scale)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        self.applied_total = self.skipped_total = self.skipped_in_a_row = 0
        self._settled = self.policy.loss_scale.kind != "dynamic"  # the scale has found its level
        self._uncalibrated = self.policy.loss_scale.calibrate
        self._loss: Tensor | None = None
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        self._after = AfterStep(schedulers, on_skip, ema, trainable)
        averages = ema.averages if ema is not None else {}
        choice = OnNonFinite.parse(on_nonfinite)
        self._ranks = ranks_of_this_process(self.device) if ranks is None else ranks
        self._guard = Guard(choice, model, self.optimizers, averages, self._ranks)
        reshard_(model)
        check_wrappers(self.policy, model)
        check_parameters(self.policy, model, self.optimizers, upcast=upcast_trainable)
        require_own_optimizer(self.policy, self.optimizers)
        if upcast_trainable and self.policy.param_dtype == torch.float32:
            upcast_trainable_(model)
        self.masters = make_masters(self.policy, model, self.optimizers)
        self.masters.clear()  # what is left from before was scaled by nobody
        cast_at_border(model, self.policy)
        self._examiner = Examiner(model, self.masters, self.optimizers, self._ranks)
        self.model = model
        self._loaded = WeightsLoaded()
        model.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]
        self._guard.start(0)

    def autocast(self) -> AbstractContextManager[None]:
        """The context for the forward and the loss, for any policy."""
        return around_model(self.policy, self.model, self.device)

    def backward(self, loss: Tensor) -> None:
        """Scale the loss and back-propagate; call once per micro-batch.

        Args:
            loss: A scalar; of k micro-batches each divided so that the sum is the whole batch's.

        Raises:
            PrecisionError: If it is no scalar or has no gradient.
        """
        check_loss(loss)
        with arithmetic(self.policy, self.device):
            if self._uncalibrated and not any(self._ranks.worst([not bool(loss.isfinite())])):
                self._uncalibrated = False
                exponent = -math.log2(calibrated(loss.reshape(()), self.policy.loss_scale))
                self.loss_scale.start_at(2.0 ** -self._ranks.worst([round(exponent)])[0])
            self.loss_scale.scale(loss.reshape(())).backward()  # type: ignore[no-untyped-call]
        value = loss.detach().float().reshape(())
        self._loss = value if self._loss is None else self._loss + value

    def step(self, loss: Tensor | None = None, *, max_norm: float | None = None) -> StepResult:
        """Check, unscale, clip and apply the gradients, or skip the step; then clear them all.

        Args:
            loss: Handed to :meth:`backward` first; leave it out after calls of ``backward``.
            max_norm: Clip the global 2-norm of the unscaled gradients to this, or None.

        Returns:
            What happened.

        Raises:
            NonFiniteError: If going on cannot help and ``on_nonfinite`` does not say otherwise: no
                finite loss; no scale to lower, or one at its floor; or too many steps in a row
                skipped. Weights and optimizer state are as before the step.
            PrecisionError: If ``backward`` was not called, or no parameter got a gradient.
            ValueError: If ``max_norm`` is not above 0.
        """
        check_max_norm(max_norm)
        if loss is not None:
            self.backward(loss)
        scale = self.loss_scale.value
        try:
            gradients = self._gradients()
            assert self._loss is not None
            loss_value, scaled_norm, found = self._examiner.judge(self._loss, gradients)
            if found is None:
                return self._skip(loss_value, scaled_norm, None)
            if found.names:
                return self._skip(loss_value, scaled_norm, found)
            norm = scaled_norm / scale
            self.masters.update_(self.optimizers, gradients, clip_factor(norm, max_norm) / scale)
        finally:
            self._loss = None
            self.masters.clear()
        calibrating = not self._settled
        self.loss_scale.update(found_nonfinite=False)
        self.skipped_in_a_row = 0
        self.applied_total += 1
        self._settled = True
        self._after(True, self.masters.items())
        self._guard.applied()
        return self._result(
            applied=True, loss=loss_value, grad_norm=norm, loss_scale=scale, calibrating=calibrating
        )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by the model's names: masters, or the parameters."""
        return self.masters.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the model's and the optimizer's state."""
        return {
            "policy": str(self.policy),
            "loss_scale": self.loss_scale.state_dict(),
            "applied_total": self.applied_total,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
            "masters": dict(self.masters.items()) if self.policy.keeps_more_than_weights else {},
        }

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], *, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Continue exactly where :meth:`state_dict` was taken.

        Args:
            state: From :meth:`state_dict`.
            weights: The model's saved weights, by name. With them another policy's state is taken
                too: its masters become this policy's, and a loss scale that does not fit starts
                anew.

        Raises:
            PrecisionError: If it is damaged, or of another policy or model; nothing is changed.
        """
        masters = check_state(state, self.policy, self.named_parameters(), weights)
        if load_scale(self.loss_scale, state, str(self.policy)):
            self._uncalibrated = False
            self._settled |= state["applied_total"] > 0
        self.applied_total = state["applied_total"]
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if masters:
            self.masters.load_(masters)
        self._loaded.weights = False
        self._guard.start(self.applied_total)

    def start_from_(self, values: Mapping[str, Tensor]) -> None:
        """Begin at fp32 values, by name, that the weights (or parts) were rounded from."""
        self.masters.load_(values)
        self._guard.start(self.applied_total)

    def take_weights_(self) -> None:
        """Train on from the model's weights as they are: after ``model.load_state_dict``."""
        weights = self.model.state_dict()
        named = self.named_parameters()
        self.masters.load_({name: local_part(weights[name]) for name in named})
        self._loaded.weights = False

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """Parameter to gradient, for all that the optimizer is about to update."""
        if self._loss is None or (self._loaded.weights and self.policy.keeps_more_than_weights):
            self._ranks.cannot()
            raise no_backward() if self._loss is None else stale_masters()
        return self._examiner.gradients()

    def _skip(self, loss: float, norm: float, found: NonFinite | None) -> StepResult:
        """Back off, go on or go back, or stop; ``found`` is None for a loss that is not finite."""
        scale, calibrating = self.loss_scale.value, not self._settled
        self.skipped_total += 1
        self.skipped_in_a_row += 1
        error: NonFiniteError | None
        if found is None:
            error = broken_loss(self.policy, loss, self.model, self._ranks)
        else:
            error = incurable(self.policy, self.loss_scale, found, loss, self.skipped_in_a_row)
        rolled_back = error is not None and self._guard.answer(error)
        if found is not None:
            self.loss_scale.update(found_nonfinite=True)
        self._after(False, ())
        return self._result(
            applied=False,
            reason="nonfinite_loss" if found is None else found.reason,
            loss=loss,
            grad_norm=norm / scale,
            loss_scale=scale,
            calibrating=calibrating,
            rolled_back=rolled_back,
            nonfinite_parameters=() if found is None else found.names,
        )

    def _result(self, **outcome: Any) -> StepResult:
        return StepResult(
            next_loss_scale=self.loss_scale.value,
            skipped_total=self.skipped_total,
            skipped_in_a_row=self.skipped_in_a_row,
            **outcome,
        )
