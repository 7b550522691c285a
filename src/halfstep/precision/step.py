"""Precision: the object that a training loop holds.

One optimizer step, in this order (the order of Megatron-Core's mixed-precision optimizer)::

    backward   of loss * scale; gradients are divided by the scale and accumulated in p.grad
    check      one global norm in fp32; if not finite, or a spike, say what and skip or stop
    update     gradients * clip factor; optimizer.step() on masters; round them into weights
    adapt      the loss scale backs off, holds or grows
    report     StepResult

The check runs in every precision and before anything is changed, so a skipped step leaves weights,
moments and step counters bit-identical. Between any two calls ``p.grad``, ``zero_grad()``,
clipping, masks and writes to weights mean what they mean in torch.
On CUDA the device takes these steps alone where it can: ``masters/stepping.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision import checks
from halfstep.precision.agreement import as_ranks, check_replicas, ranks_of_this_process
from halfstep.precision.casting.autocast import Autocast, ForwardWatch, require_support
from halfstep.precision.casting.cast import (
    cast_at_border,
    check_wrappers,
    give_back_,
    make_clock,
)
from halfstep.precision.masters.accumulation import GradientAccumulation
from halfstep.precision.masters.local_part import is_sharded, reshard_
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.masters.portable import make_plain_, make_portable_
from halfstep.precision.masters.stepping import (
    Decision,
    DeviceDecision,
    DevicePath,
    Gradients,
    device_path,
    require_own_optimizer,
)
from halfstep.precision.policy.policy import LOW, PrecisionPolicy
from halfstep.precision.policy.rules import PlacedModel, place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import Outcome, Recovery
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import Examiner, Judged, OneRank, Ranks, clip_factor
from halfstep.precision.scaling.loss_scale import LossScale

if TYPE_CHECKING:
    from halfstep.precision.ema import EMA


class Precision:
    """Mixed-precision training in the user's own loop, under one policy.

    Args:
        policy: A policy, its name (``auto``: by the device), field string or ``.toml`` file.
        model: On its final device. With 16-bit weights its floating parameters are cast in place,
            and ``model(...)`` casts floating inputs to the compute dtype and floating outputs to
            fp32.
        optimizer: One, or several that step together, over the model's parameters, none stepped
            yet. Any optimizer will do, but ``bf16-split``, ``bf16-kahan``, ``bf16-sr`` and low
            ``moments`` need one of :mod:`halfstep.optim`. Its groups keep the model's own
            parameters; masters replace them only while it steps.
        on_nonfinite: What to do where no loss scale can help: ``"stop"``, or ``"skip:K"``, which
            leaves out up to K such steps in a row.
        on_spike: What to do about a finite loss or norm far above the steps before: ``"off"``, or
            the same two.
        ema: An average that :meth:`step` updates, from exact masters, after applied steps.
        ranks: The ranks that must agree on each step, and so must call each method together. None:
            all of ``torch.distributed``'s default group, if it is initialised.

    Raises:
        PrecisionError: If policy, device, model and optimizer are not compatible; nothing has been
            changed then.

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
        on_nonfinite: str | Recovery = "stop",
        on_spike: str | Recovery = "off",
        ema: EMA | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Check the policy against the device, and cast and copy weights as the policy says."""
        checks.check_arguments(model, optimizer)
        self.model = model
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        self.device = checks.one_device(model)
        self.policy = parse_policy(policy, self.device)
        self.support = require_support(self.policy, self.device)
        self.recovery = {
            "on_nonfinite": Recovery.parse(on_nonfinite),
            "on_spike": Recovery.parse(on_spike, "on_spike"),
        }
        self.ranks = ranks_of_this_process(self.device) if ranks is None else as_ranks(ranks)
        self.clock = make_clock()
        self._loss: Tensor | None = None
        self._last: weakref.ref[Tensor] | None = None  # the loss that backward was called with
        if ema is not None:
            ema.require([name for name, p in model.named_parameters() if p.requires_grad])
        _require_free(model)
        reshard_(model)
        check_wrappers(self.policy, model)
        placed = place(self.policy, model)
        checks.check_parameters(placed, self.optimizers)
        require_own_optimizer(self.policy, self.optimizers)
        check_replicas(model.named_parameters(), self.ranks)
        self._door = _StepDoor(self.optimizers)
        try:
            self._take(placed, ema)
        except BaseException:  # a stored error, as in a notebook, would keep this object alive
            self._door.close()
            raise

    def _take(self, placed: PlacedModel, ema: EMA | None) -> None:
        """Cast the model's weights, create the parts that watch its steps, and attach the hooks."""
        policy, model = self.policy, self.model
        self.masters = MasterWeights(placed, self.optimizers)
        self.masters.clear()  # older gradients belong to no step of this Precision
        self.outcome = Outcome(
            policy=policy,
            model=model,
            masters=self.masters,
            ranks=self.ranks,
            recovery=self.recovery,
            ema=ema,
        )
        spikes = self.outcome.spikes
        self._examiner = Examiner(model, self.masters, self.ranks, spikes)
        self.path: DevicePath | None = None  # the steps that are decided on the device
        if spikes is None and isinstance(self.ranks, OneRank):  # the host tests for spikes itself
            self.path = device_path(self.optimizers, self.masters.installed)
        self._context = Autocast(policy, model, self.device, self.masters.adopt)
        cast_at_border(placed, self.clock)
        hooks = [*ForwardWatch(policy, self.device).attach(model), *self.masters.handles]
        if self.path is not None:
            hooks += self.path.attach(weakref.WeakMethod(self.settle))
        # a model with 16-bit weights needs its casts even after this Precision is gone, and its
        # optimizers stay shut: with the masters the bits are gone that the weights cannot hold
        stays = policy.param_dtype != torch.float32
        low = [p for p in model.parameters() if stays and p.dtype in LOW and not is_sharded(p)]
        make_portable_(model, low, weakref.WeakMethod(self.masters.exact))
        self._released = weakref.finalize(
            self,
            _release,
            door=None if stays else self._door,
            accumulation=self.masters.accumulation,
            hooks=hooks,
            model=None if stays else model,
        )
        self.masters.divide_states_()

    def autocast(self) -> Autocast:
        """The context for forward and loss, any number of times, in any thread; or a decorator."""
        return self._context

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Back-propagate a loss; call it once per micro-batch, or once for each of several losses.

        It adds the unscaled gradient to ``p.grad`` of the model's parameters, whatever the loss
        scale. Until :meth:`step`, ``p.grad`` may be read, clipped, masked, edited and cleared.

        Args:
            loss: A scalar. Divide each micro-batch's loss so that their sum is the batch's loss.
            retain_graph: As in ``Tensor.backward``.
            create_graph: As in ``Tensor.backward``.
            inputs: As in ``Tensor.backward``, but leaves only. If none of them is a parameter of
                the optimizers, as for an adversarial attack, the loss is not counted in a step.

        Raises:
            PrecisionError: If the loss is not a scalar or needs no gradient, or comes from a
                forward outside an :meth:`autocast` that is needed.
        """
        self._require_open()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise checks.no_loss(loss)
        asked = () if inputs is None else checks.as_inputs(inputs)
        self.masters.adopt()
        if not self.has_loss:
            self._loss = None  # its gradients have been cleared since
        kind = self.policy.loss_scale.kind
        if kind == "dynamic":
            self.settle()  # the last step may have lowered the scale
        scale, scaled = self.outcome.progress.loss_scale.value, loss.reshape(())
        with self._context.arithmetic(), self.masters.accumulation.running(scale, loss):
            if kind != "none":
                scaled = scaled.float() * scale
            scaled.backward(  # type: ignore[no-untyped-call]
                retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
            )
        if inputs is None or self.masters.trains(asked):
            self._last = weakref.ref(loss)
            value = loss.detach().float().reshape(())
            self._loss = value if self._loss is None else self._loss + value
            self.masters.note()

    @property
    def has_loss(self) -> bool:
        """Whether anything back-propagated waits for a step, and was not cleared."""
        return self._loss is not None and not self.masters.accumulation.cleared()

    def discard(self) -> None:
        """Drop everything back-propagated since the last step: gradients and losses.

        ``zero_grad()`` of the model or of all optimizers does the same.
        """
        self.masters.clear()
        self._loss = self._last = None
        if self._context.casts_per_op:  # an open context must not reuse casts of the old weights
            torch.clear_autocast_cache()

    def close(self) -> None:
        """Release model and optimizers: hooks go, no context is needed, ``optimizer.step`` works.

        Weights stay in the policy's format; gradients and the masters' extra bits are dropped. The
        model can then be exported, or given to another Precision. ``with Precision(...) as
        precision:`` closes at the end of the block.
        """
        try:
            self.settle()
        finally:
            self.discard()
            self._door.close()
            self._released()
            _give_back_(self.model)
            self.masters.close()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, loss: Tensor | None = None, *, max_norm: float | None = None) -> StepResult:
        """Check, clip and apply the gradients, or skip the step; then clear them all.

        Args:
            loss: Passed to :meth:`backward` first; leave it out if ``backward`` was called.
            max_norm: Clip the global 2-norm of the gradients to this, or None.

        Raises:
            NonFiniteError: If continuing cannot help and ``on_nonfinite`` does not say otherwise:
                the loss is not finite, there is no scale to lower or it is at its floor, or too
                many steps in a row were skipped. Weights and optimizer state are unchanged. On CUDA
                it may be raised when the result is read, or by the next call.
            SpikeError: If a finite loss or norm spikes, where ``on_spike`` says so; as above.
            PrecisionError: If ``backward`` was not called, no parameter got a gradient, or
                ``max_norm`` is not above 0.
        """
        self._require_open()
        if max_norm is not None and not (type(max_norm) is float and max_norm > 0):
            checks.check_max_norm(max_norm)
        if self.outcome.ema is not None:
            self.outcome.ema.require_own_weights()
        if loss is not None:
            if self._last is not None and self._last() is loss:
                raise checks.twice()
            self.backward(loss)
        try:
            return self._step(max_norm)
        finally:
            self.discard()

    def _step(self, max_norm: float | None) -> StepResult:
        """Take the step of the gradients that have accumulated."""
        self.settle()
        loss, gradients = self._gradients()
        self.clock.step += 1
        decision = None if self.path is None else self.path.decide(loss, gradients, max_norm)
        if self.path is not None and decision is not None:
            self._update(gradients, decision)
            result = self.path.result(decision, gradients, self._learn)
            if self.outcome.waits:
                self.settle()
            return result
        judged = self._examiner.judge(loss, gradients)
        if judged.broken:
            return self.outcome.skipped(judged)
        self._update(gradients, clip_factor(judged.norm, max_norm))
        return self._applied(judged)

    def _gradients(self) -> tuple[Tensor, Gradients]:
        """The loss, and the finished gradient of each tensor that is about to be updated."""
        try:
            loss = self._loss
            if loss is None:
                raise checks.no_backward()
            if not self.has_loss:  # as in torch, a step with zero gradients is a step
                loss = torch.zeros_like(loss)
            self.masters.adopt()
            gradients = self.masters.gradients()
            if not gradients:
                raise checks.no_gradients()
        except PrecisionError:
            self.ranks.cannot()
            raise
        return loss, gradients

    def _update(self, gradients: Gradients, factor: float | DeviceDecision) -> None:
        self.masters.take_written_()
        with self._door.open():
            self.masters.update_(gradients, factor)

    def _applied(self, judged: Judged) -> StepResult:
        result = self.outcome.progress.applied(judged)
        if self.outcome.follows:
            self.outcome.advance(judged)
        return result

    def _learn(self, decision: Decision) -> StepResult:
        """Count a step that the device took or skipped, as if the host had decided about it."""
        judged = self._examiner.judged(decision)
        return self.outcome.skipped(judged) if judged.broken else self._applied(judged)

    def settle(self) -> None:
        """Wait for the last step on the device, and raise the NonFiniteError that it ended with."""
        if self.path is not None:
            self.path.settle()

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale after the last step, whose outcome this waits for, as do all counts."""
        self.settle()
        return self.outcome.progress.loss_scale

    @property
    def applied_total(self) -> int:
        """Applied steps."""
        self.settle()
        return self.outcome.progress.applied_total

    @property
    def skipped_total(self) -> int:
        """Skipped steps."""
        self.settle()
        return self.outcome.progress.skipped_total

    @property
    def skipped_in_a_row(self) -> int:
        """Steps skipped since the last applied one."""
        self.settle()
        return self.outcome.progress.skipped_in_a_row

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer updates, by the model's names: masters or parameters.

        Only read masters: a value written into one is overwritten from its weight unless it rounds
        to that weight. Write the weight instead, or give :meth:`start_from_` exact values.
        """
        return self.masters.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's and the optimizers' state dicts."""
        self.settle()
        self.masters.adopt()
        masters: dict[str, Tensor] = {}
        if self.policy.keeps_more_than_weights:
            if self.outcome.ema is not None:
                self.outcome.ema.require_own_weights()
            self.masters.take_written_()
            masters = dict(self.masters.items())
        return self.outcome.state(masters)

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], *, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Continue exactly where :meth:`state_dict` was taken.

        Args:
            state: From :meth:`state_dict`.
            weights: The model's saved weights, by name. With them another policy's state is
                accepted, too: its masters are converted, and a loss scale that does not fit starts
                afresh.

        Raises:
            PrecisionError: If it is damaged, or from another policy or model; nothing is changed.
        """
        self.settle()
        self.masters.adopt()
        masters = checks.check_state(state, self.policy, self.named_parameters(), weights)
        self.outcome.load(state)
        progress = self.outcome.progress
        self.clock.step = progress.applied_total + progress.skipped_total
        if masters:
            self.masters.load_(masters)
        self.masters.divide_states_()

    def start_from_(self, values: Mapping[str, Tensor]) -> None:
        """Start from fp32 values, by name, that the weights (or local parts) were rounded from."""
        self.masters.adopt()
        self.masters.load_(values)

    def take_weights_(self) -> None:
        """Continue from the model's weights exactly as they are; masters and remainders are reset.

        Without this call, weights that were written or loaded are adopted only to within half a gap
        of their format where a remainder is kept; this adopts them to the last bit.
        """
        self.masters.adopt()
        self.masters.take_all_()

    def _require_open(self) -> None:
        if not self._released.alive:
            raise checks.closed()


# What refuses a loop that would train wrongly in silence.


def _require_free(model: nn.Module) -> None:
    """Refuse a model, or a part of it, that a Precision trains which has not been closed."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    if any(isinstance(hook, ForwardWatch) for hook in hooks):
        raise PrecisionError(
            "the model is trained by another Precision already, whose masters and loss scale this "
            "one would override. Call close() on that one first; for several optimizers give one "
            "Precision a list of them"
        )


class _StepDoor:
    """An optimizer hook that refuses any step not made by the optimizer's own Precision."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_open = False
        self._handles = [optimizer.register_step_pre_hook(self) for optimizer in optimizers]

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step unless the Precision itself is stepping."""
        if not self._is_open:
            raise PrecisionError(
                f"{type(optimizer).__name__}.step() was called by hand (or by a GradScaler), and "
                "this optimizer belongs to a Precision, which checks, clips, rounds and scales the "
                "loss. Call precision.step(loss) instead, without a GradScaler; or "
                "precision.close() to go on without it"
            )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow the optimizers to step inside the block."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def close(self) -> None:
        """Let the optimizers step without a Precision again."""
        for handle in self._handles:
            handle.remove()


def _release(
    door: _StepDoor | None,
    accumulation: GradientAccumulation,
    hooks: Sequence[RemovableHandle],
    model: nn.Module | None,
) -> None:
    """Remove the hooks that must not outlive a Precision, where they would refuse later use."""
    if door is not None:
        door.close()
    accumulation.release()
    for hook in hooks:
        hook.remove()
    if model is not None:
        _give_back_(model)


def _give_back_(model: nn.Module) -> None:
    """Take the casts at a model's border off it, and what lets it be saved as a plain one."""
    give_back_(model)
    make_plain_(model)
