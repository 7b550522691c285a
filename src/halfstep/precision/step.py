"""Precision: the object that a training loop holds.

One optimizer step, in this order (the order of Megatron-Core's mixed-precision optimizer)::

    backward   of loss * scale; gradients arrive in p.grad divided by the scale, and add up there
    check      one global norm in fp32; not finite: name the parameters, skip or stop
    update     gradients * clip factor; optimizer.step() on masters; round them into weights
    adapt      the loss scale backs off, holds or grows
    report     StepResult

The check runs in every precision and before anything is changed, so a skipped step leaves weights,
moments and step counters bit-identical. Between any two calls ``p.grad``, ``zero_grad()``,
clipping, masks and writes to weights mean what they mean in torch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.after_step import EMA, AfterStep, OnSkip, no_own_weights
from halfstep.precision.agreement import as_ranks, check_replicas, ranks_of_this_process
from halfstep.precision.border import require
from halfstep.precision.casting.autocast import Autocast, require_support
from halfstep.precision.casting.cast import (
    cast_at_border,
    check_wrappers,
    give_back_,
    is_cast,
    upcast_,
)
from halfstep.precision.checks import (
    as_closure,
    check_arguments,
    check_max_norm,
    check_parameters,
    check_state,
    load_scale,
    no_backward,
    no_gradients,
    no_loss,
    one_device,
    require_one,
)
from halfstep.precision.masters.arrivals import Arrivals
from halfstep.precision.masters.local_part import is_sharded, reshard_
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.masters.portable import Loaded, make_plain_, make_portable_
from halfstep.precision.masters.stepping import require_own_optimizer
from halfstep.precision.ownership import ForwardWatch, OneScaler, StepDoor
from halfstep.precision.policy.policy import LOW, PrecisionPolicy
from halfstep.precision.policy.rules import PlacedModel, place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import Guard, OnNonFinite, Snapshot, broken_loss, incurable
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.calibrate import largest_finite_scale
from halfstep.precision.scaling.gradients import Examiner, Judged, Ranks, clip_factor
from halfstep.precision.scaling.loss_scale import make_loss_scale


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
        on_nonfinite: str | OnNonFinite = "stop",
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
                ``moments`` need those of :mod:`halfstep.optim`. Its groups keep the model's own
                parameters; masters stand in their places while it steps.
            on_nonfinite: Where no loss scale can help: ``"stop"``, ``"skip:K"`` or ``"rollback:N"``
                (:class:`~halfstep.precision.recovery.OnNonFinite`).
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
        check_arguments(model, optimizer)
        self.device = one_device(model)
        self.support = require_support(self.policy, self.device)
        self.loss_scale = make_loss_scale(self.policy.loss_scale)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        self.applied_total = self.skipped_total = self.skipped_in_a_row = 0
        self._scaled = self.policy.loss_scale.kind != "none"
        self._settled = self.policy.loss_scale.kind != "dynamic"  # the scale has found its level
        self._uncalibrated = self.policy.loss_scale.calibrate
        self._loss: Tensor | None = None
        self._last: weakref.ref[Tensor] | None = None  # the loss that backward was called with
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        self._after = AfterStep(schedulers, on_skip, ema, trainable)
        self._schedulers, self._ema = schedulers, ema
        choice = OnNonFinite.parse(on_nonfinite)
        self._ranks = ranks_of_this_process(self.device) if ranks is None else as_ranks(ranks)
        reshard_(model)
        check_wrappers(self.policy, model)
        placed = place(self.policy, model)
        check_parameters(placed, self.optimizers, upcast=upcast_trainable)
        require_own_optimizer(self.policy, self.optimizers)
        check_replicas(model.named_parameters(), self._ranks)
        self._door = StepDoor(self.policy, self.optimizers, names)
        try:
            self._take(model, placed, choice, upcast=upcast_trainable)
        except BaseException:  # an error that is kept, as in a notebook, keeps this object alive
            self._door.close()
            raise

    def _take(
        self, model: nn.Module, placed: PlacedModel, choice: OnNonFinite, *, upcast: bool
    ) -> None:
        """Cast the model's weights, make what watches over its steps, and attach the hooks."""
        if upcast and self.policy.param_dtype == torch.float32:
            upcast_(p for p in model.parameters() if p.requires_grad and p.dtype in LOW)
        self.masters = MasterWeights(placed, self.optimizers)
        self.masters.clear()  # what is left from before belongs to no step of this Precision
        self._guard: Guard | None = None
        if choice.action != "stop":
            averages = self._ema.averages if self._ema is not None else {}
            self._guard = Guard(choice, model, self.optimizers, averages, self._ranks)
        self._examiner = Examiner(model, self.masters, self.optimizers, self._ranks)
        self._scalers = OneScaler()
        self._watch = ForwardWatch(self.policy, self.device)
        self.model = model
        self._context = Autocast(self.policy, model, self.device, self.masters.adopt)
        cast_at_border(placed)
        hooks = [*self._watch.attach(model), *self.masters.handles]
        # 16-bit weights need their casts for ever
        stays = self.policy.param_dtype != torch.float32
        low = [p for p in model.parameters() if stays and p.dtype in LOW and not is_sharded(p)]
        make_portable_(model, is_ours, low, weakref.WeakMethod(self.masters.exact))
        left = None if stays else model
        self._released = weakref.finalize(
            self, _release, self._door, self.masters.arrivals, hooks, left
        )
        self._begin(0)

    def autocast(self) -> Autocast:
        """The context for the forward and the loss, for any policy; also usable as a decorator.

        It may be entered any number of times, and from several threads.
        """
        return self._context

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Back-propagate; call once per micro-batch, or for each of several losses.

        ``p.grad`` of the model's parameters is the gradient then, added to what was there, whatever
        the loss scale. Until :meth:`step` it may be read, clipped, masked, edited and cleared.

        Args:
            loss: A scalar; of k micro-batches each divided so that the sum is the whole batch's.
            retain_graph: As ``Tensor.backward``, and so are the other two.
            create_graph: See there.
            inputs: See there. Where no parameter of the optimizers is among them, the loss counts
                in no step.

        Raises:
            PrecisionError: If the loss is no scalar or has no gradient, was scaled by a GradScaler,
                or comes from a forward outside of :meth:`autocast` where the policy needs that.
        """
        self._require_open()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise no_loss(loss)
        asked: Sequence[Tensor] = ()
        if inputs is not None:
            allowed = "a tensor, or a list of some"
            require(inputs, (Tensor, list, tuple), "backward(inputs)", allowed)
            asked = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        self._scalers.require(loss)
        self.masters.adopt()
        if self._loss is not None and self.masters.arrivals.cleared():
            self._loss = None  # its gradients have been cleared since
        with self._context.arithmetic():
            if self._uncalibrated and not any(self._ranks.worst([not bool(loss.isfinite())])):
                self._uncalibrated = False
                config = self.policy.loss_scale
                found = largest_finite_scale(
                    loss.reshape(()), minimum=config.min_scale, maximum=config.max_scale
                )
                self.loss_scale.start_at(2.0 ** -self._ranks.worst([-round(math.log2(found))])[0])
            with self.masters.arrivals.running(self.loss_scale.value, loss, asked):
                scalar = loss.reshape(())
                scaled = self.loss_scale.scale(scalar) if self._scaled else scalar
                scaled.backward(  # type: ignore[no-untyped-call]
                    retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
                )
        if inputs is not None and not self.masters.trains(asked):
            return  # as of an attack on the inputs: this loss is none of the step's
        self._last = weakref.ref(loss)
        value = loss.detach().float().reshape(())
        self._loss = value if self._loss is None else self._loss + value
        self.masters.note()

    def unscale_(self) -> None:
        """Do nothing: gradients in ``p.grad`` are unscaled from the start.

        It is here for loops that call it before they clip, as ``torch.amp.GradScaler`` wants it.
        """

    def discard(self) -> None:
        """Forget all that was back-propagated since the last step: gradients and losses.

        ``zero_grad()`` of the model or of all optimizers does the same.
        """
        self.masters.clear()
        self._loss = self._last = None
        if self._context.casts_per_op:  # a context that is still on must cast the new weights
            torch.clear_autocast_cache()

    def close(self) -> None:
        """Give the model and the optimizers back: no hooks, no context needed, steps by hand.

        Weights stay in the policy's format; what masters hold beyond it is dropped, as gradients
        are. The model can then be exported, or taken by another Precision.
        """
        self.discard()
        self._door.close()
        self._released()
        _give_back_(self.model)
        self.masters.close()

    def step(
        self,
        loss: Tensor | Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
    ) -> StepResult:
        """Check, clip and apply the gradients, or skip the step; then clear them all.

        Args:
            loss: Handed to :meth:`backward` first; leave it out after calls of ``backward``. Or a
                closure, for optimizers as ``LBFGS`` that look several times: it clears gradients,
                computes the loss in :meth:`autocast`, calls :meth:`backward` and returns the loss.
            max_norm: Clip the global 2-norm of the gradients to this, or None.

        Returns:
            What happened.

        Raises:
            NonFiniteError: If going on cannot help and ``on_nonfinite`` does not say otherwise: no
                finite loss; no scale to lower, or one at its floor; or too many steps in a row
                skipped. Weights and optimizer state are as before the step.
            PrecisionError: If ``backward`` was not called, no parameter got a gradient, or
                ``max_norm`` is not above 0.
        """
        self._require_open()
        if max_norm is not None and not (type(max_norm) is float and max_norm > 0):
            check_max_norm(max_norm)
        self._require_own_weights()
        if loss is not None and not isinstance(loss, Tensor):
            return self._step_with(as_closure(loss), max_norm)
        if loss is not None:
            if self._last is not None and self._last() is loss:
                raise PrecisionError(
                    "step(loss) back-propagates the loss, and backward(loss) has done so already: "
                    "call step() without it"
                )
            self.backward(loss)
        try:
            gradients = self._gradients()
            judged = self._judge(gradients)
            if judged.broken:
                return self._skip(judged)
            self.masters.take_written_()
            with self._door.open():
                self.masters.update_(gradients, clip_factor(judged.norm, max_norm))
        finally:
            self.discard()
        return self._applied(judged)

    def _step_with(self, closure: Callable[[], Any], max_norm: float | None) -> StepResult:
        """A step of an optimizer that evaluates the loss itself, as often as it likes.

        The closure sees the model's own parameters, rounded from what the optimizer has made of
        them by then. One evaluation that is not finite takes the whole step back.
        """
        (optimizer,) = require_one(self.optimizers)
        seen: list[Judged] = []

        def evaluate() -> Any:
            self.masters.push_()
            with self.masters.installed(False), torch.enable_grad():
                value = closure()
                gradients = self._gradients()
                seen.append(self._judge(gradients))
            if seen[-1].broken:
                raise _BrokenClosure
            factor = clip_factor(seen[-1].norm, max_norm)
            self.masters.hand_over(self.optimizers, gradients, factor)
            self._loss = None
            return value

        self.masters.take_written_()
        with self.masters.installed():
            before = Snapshot(self.model, self.optimizers, {})
            try:
                with self._door.open():
                    optimizer.step(evaluate)
            except _BrokenClosure:
                before.restore_()
                with self.masters.installed(False):
                    return self._skip(seen[-1])
            finally:
                self.discard()
        self.masters.push_()
        if not seen:
            raise no_backward()
        return self._applied(seen[0])

    def _applied(self, judged: Judged) -> StepResult:
        """Everything that follows an applied step."""
        scale, calibrating = self.loss_scale.value, not self._settled
        if self._scaled:
            self.loss_scale.update(found_nonfinite=False)
        self.skipped_in_a_row = 0
        self.applied_total += 1
        self._settled = True
        if self._schedulers or self._ema is not None:
            self._after(True, self.masters.items())
        if self._guard is not None:
            with self.masters.installed():
                self._guard.applied()
        return self._result(judged, scale, calibrating, applied=True)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by the model's names: masters, or the parameters.

        Masters are there to be read. What is written into one is overruled by its weight, if that
        does not round to the same; write the weight, or give :meth:`start_from_` exact values.
        """
        return self.masters.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the model's and the optimizer's state."""
        self.masters.adopt()
        masters: dict[str, Tensor] = {}
        if self.policy.keeps_more_than_weights:
            self._require_own_weights()
            self.masters.take_written_()
            masters = dict(self.masters.items())
        return {
            "policy": str(self.policy),
            "loss_scale": self.loss_scale.state_dict(),
            "applied_total": self.applied_total,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
            "masters": masters,
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
        self.masters.adopt()
        masters = check_state(state, self.policy, self.named_parameters(), weights)
        if load_scale(self.loss_scale, state, str(self.policy)):
            self._uncalibrated = False
            self._settled |= state["applied_total"] > 0
        self.applied_total = state["applied_total"]
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if masters:
            self.masters.load_(masters)
        self._begin(self.applied_total)

    def start_from_(self, values: Mapping[str, Tensor]) -> None:
        """Begin at fp32 values, by name, that the weights (or parts) were rounded from."""
        self.masters.adopt()
        self.masters.load_(values)
        self._begin(self.applied_total)

    def take_weights_(self) -> None:
        """Train on from the model's weights exactly as they are: what lies behind them is dropped.

        Weights that are written, or loaded with ``load_state_dict``, are taken over by themselves
        to half a gap of the weights' format; this takes them to the last bit.
        """
        self.masters.adopt()
        self.masters.take_all_()

    def _require_open(self) -> None:
        if not self._released.alive:
            raise PrecisionError(
                "this Precision was closed and trains nothing any more; make another one"
            )

    def _require_own_weights(self) -> None:
        if self._ema is not None and self._ema.applied:
            raise no_own_weights()

    def _begin(self, applied: int) -> None:
        """Let the guard begin after ``applied`` steps."""
        with self.masters.installed():  # which also gives states of sharded weights to their parts
            if self._guard is not None:
                self._guard.start(applied)

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """Parameter to gradient, for all that the optimizer is about to update."""
        if self._loss is None:
            self._ranks.cannot()
            raise no_backward()
        if self.masters.arrivals.cleared():  # as in torch, a step with zeros is one
            self._loss = torch.zeros_like(self._loss)
        try:
            self.masters.adopt()
            self._door.take()
            gradients = self.masters.gradients()
            if not gradients:
                raise no_gradients()
        except PrecisionError:
            self._ranks.cannot()
            raise
        return gradients

    def _judge(self, gradients: Mapping[nn.Parameter, Tensor]) -> Judged:
        assert self._loss is not None, "checked with the gradients"
        return self._examiner.judge(self._loss, gradients)

    def _skip(self, judged: Judged) -> StepResult:
        """Back off, go on or go back, or stop."""
        scale, calibrating = self.loss_scale.value, not self._settled
        found = judged.found
        self.skipped_total += 1
        self.skipped_in_a_row += 1
        error: NonFiniteError | None
        if found is None:
            error = broken_loss(self.policy, judged.loss, self.model, self._ranks)
        else:
            error = incurable(
                self.policy, self.loss_scale, found, judged.loss, self.skipped_in_a_row
            )
        rolled_back = False
        if error is not None:
            if self._guard is None:
                raise error
            with self.masters.installed():
                rolled_back = self._guard.answer(error)
        if found is not None:
            self.loss_scale.update(found_nonfinite=True)
        self._after(False, ())
        return self._result(
            judged,
            scale,
            calibrating,
            applied=False,
            reason="nonfinite_loss" if found is None else found.reason,
            rolled_back=rolled_back,
            nonfinite_parameters=() if found is None else found.names,
        )

    def _result(
        self, judged: Judged, scale: float, calibrating: bool, **outcome: Any
    ) -> StepResult:
        return StepResult(
            loss=judged.loss,
            grad_norm=judged.norm,
            loss_scale=scale,
            calibrating=calibrating,
            next_loss_scale=self.loss_scale.value,
            skipped_total=self.skipped_total,
            skipped_in_a_row=self.skipped_in_a_row,
            **outcome,
        )


class _BrokenClosure(Exception):
    """An evaluation inside a step was not finite."""


def is_ours(value: object) -> bool:
    """Whether a hook or a replaced ``forward`` was put on a model by Precision."""
    value = getattr(value, "hook", value)  # torch wraps hooks that come before a load
    return isinstance(value, ForwardWatch | Loaded) or is_cast(value)


def _release(
    door: StepDoor,
    arrivals: Arrivals,
    hooks: Sequence[RemovableHandle],
    model: nn.Module | None,
) -> None:
    """What must go with a Precision, or would refuse what comes after it."""
    door.leave()
    arrivals.release()
    for hook in hooks:
        hook.remove()
    if model is not None:
        _give_back_(model)


def _give_back_(model: nn.Module) -> None:
    give_back_(model)
    make_plain_(model)
