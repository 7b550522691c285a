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

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import halfstep.precision.low_bit as low_bit
from halfstep.errors import PrecisionError
from halfstep.precision import checks
from halfstep.precision.agreement import AnyRanks, ranks_of_this_process
from halfstep.precision.casting.autocast import (
    Autocast,
    ForwardWatch,
    outside_graphs,
    require_support,
)
from halfstep.precision.casting.cast import Clock, cast_at_border, give_back_
from halfstep.precision.casting.op_table import before_forward, drop_casts
from halfstep.precision.masters.local_part import is_sharded, reshard_
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.masters.portable import Hook, make_plain_, make_portable_
from halfstep.precision.masters.stepping import (
    Decision,
    DeviceDecision,
    DevicePath,
    Gradients,
    device_path,
    with_inner,
)
from halfstep.precision.policy.policy import LOW, PrecisionPolicy
from halfstep.precision.policy.rules import PlacedModel, place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import Outcome, Recovery
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import (
    Judged,
    NonFinite,
    OneRank,
    Progress,
    Share,
    clip_factor,
    exact_global_norm,
    find_nonfinite,
    global_norm,
)
from halfstep.precision.scaling.loss_scale import LossScale
from halfstep.precision.scaling.pipeline import Losses
from halfstep.precision.words import lost, tell

if TYPE_CHECKING:
    from halfstep.precision.ema import EMA


class Precision:
    """Mixed-precision training in the user's own loop, under one policy.

    Args:
        policy: A policy, its name (``auto``: by the device) or field string.
        model: On its final device. With 16-bit weights its floating parameters are cast in place,
            and ``model(...)`` casts floating inputs to the compute dtype and outputs to fp32.
        optimizer: One, or several that step together, over the model's parameters.
            ``bf16-split``, ``bf16-kahan``, ``bf16-sr`` and low ``moments`` need one of
            :mod:`halfstep.optim` that has not stepped yet.
        on_nonfinite: What to do where no loss scale can help: ``"stop"``, or ``"skip:K"``, which
            leaves out up to K such steps in a row.
        on_spike: The same for a finite loss or norm far above the steps before; or ``"off"``.
        ema: An average that :meth:`step` updates, from exact masters, after applied steps.
        ranks: The ranks that must agree on each step, and so must call each method together: a
            process group, a device mesh, :class:`ManyRanks` or :class:`OneRank`. None: those of
            the wrapper that the model has, DDP's group or FSDP2's mesh, else all.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> precision = Precision("bf16-mixed", model, optimizer)
        >>> with precision.autocast():
        ...     loss = model(torch.ones(8, 4)).square().mean()
        >>> precision.step(loss, max_norm=1.0).applied
        True
    """

    def __init__(
        self,
        policy: str | PrecisionPolicy,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        *,
        on_nonfinite: str | Recovery = "stop",
        on_spike: str | Recovery = "off",
        ema: EMA | None = None,
        ranks: AnyRanks | None = None,
    ) -> None:
        """Check the policy against the device, and cast and copy weights as the policy says."""
        checks.check_arguments(model, optimizer, ema)
        self.model = model
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        self.device = checks.one_device(model)
        self.policy = parse_policy(policy, self.device)
        self.support = require_support(self.policy, self.device)
        self.recovery = {
            "on_nonfinite": Recovery.parse(on_nonfinite),
            "on_spike": Recovery.parse(on_spike, "on_spike"),
        }
        self.clock = Clock()
        self._loss: Tensor | None = None
        self._losses = Losses()
        self._begun = 0  # steps, with their first backward
        self._last: weakref.ref[Tensor] | None = None  # the loss that backward was called with
        reshard_(model)
        self.ranks = ranks_of_this_process(self.device, ranks, model)
        placed = place(self.policy, model)
        narrow = [p.name for p in placed.low if low_bit.stays_bf16(p)]
        reason = self.support.reason
        if narrow:
            reason += f"; {len(narrow)} of {len(placed.low)} layers are too narrow and stay in bf16"
            reason += f": {narrow[0]}"
        if placed.unreached:
            reason += f"; modules that multiply by weights of their own ({len(placed.unreached)}), "
            reason += f"not by linear layers, stay in bf16: {placed.unreached[0]}"
        self.support = replace(self.support, reason=reason)
        checks.check_parameters(placed, self.optimizers)
        self.ranks = self.ranks.bound(model.named_parameters())
        door = _StepDoor(with_inner(self.optimizers))
        try:
            self._take(placed, door, ema)
        except BaseException:  # a stored error, as in a notebook, would keep this object alive
            door.close()
            raise

    def _take(self, placed: PlacedModel, door: _StepDoor, ema: EMA | None) -> None:
        """Cast the model's weights, create the parts that watch its steps, and attach the hooks."""
        policy, model = self.policy, self.model
        self.masters = MasterWeights(placed, self.optimizers)
        door.begins = weakref.WeakMethod(self.masters.exchange.begins)
        self.masters.clear()  # older gradients belong to no step of this Precision
        self.outcome = Outcome(policy, model, self.masters, self.ranks, self.recovery, ema)
        self.path: DevicePath | None = None  # the steps that are decided on the device
        if self.outcome.spikes is None and isinstance(self.ranks, OneRank):
            self.path = device_path(self.optimizers, self.masters.installed)
        self._steps = _Steps(self, door)
        self._context = Autocast(policy, model, self.device, self.masters.adopt)
        cast_at_border(placed, self.clock)
        hooks = [
            *ForwardWatch(policy, self.device, weakref.ref(self)).attach(model),
            *self.masters.handles,
        ]
        if self._context.casts_per_op and self.device.type != "cpu":  # where no mode sees writes
            look = Hook(partial(before_forward, self.masters.weights, []))
            hooks.append(model.register_forward_pre_hook(look))
        if self.path is not None:
            hooks += self.path.attach(weakref.WeakMethod(self.settle))
        # a model with 16-bit weights needs its casts even after this Precision is gone, and its
        # optimizers stay shut: with the masters the bits are gone that the weights cannot hold
        stays = policy.param_dtype != torch.float32
        low = [p for p in model.parameters() if stays and p.dtype in LOW and not is_sharded(p)]
        make_portable_(model, low, weakref.WeakMethod(self.masters.exact))
        back = (None, None) if stays else (door, model)
        self._released = weakref.finalize(self, _release, hooks, *back)

    def autocast(self) -> Autocast:
        """The context for forward and loss, any number of times, in any thread; or a decorator."""
        return self._context.here()

    @outside_graphs
    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Add the unscaled gradient of a loss to ``p.grad``; once per micro-batch, or per loss.

        Args:
            loss: A scalar. Divide each micro-batch's loss so that their sum is the batch's loss.
            retain_graph: As in ``Tensor.backward``, as is ``create_graph``.
            create_graph: See there.
            inputs: As there, but leaves only. If none of them is a parameter of the optimizers, as
                for an adversarial attack, the loss is not counted in a step.
        """
        self._require_open()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise checks.no_loss(loss)
        asked = () if inputs is None else checks.as_inputs(inputs)
        scale, scaled = self._scale(), loss.reshape(())
        with self.masters.accumulation.running(scale, loss), self._context.arithmetic():
            if self.policy.loss_scale.kind != "none":
                scaled = scaled.float() * scale
            try:
                scaled.backward(  # type: ignore[no-untyped-call]
                    retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
                )
            except RuntimeError as error:
                lost(error, self.ranks.members, f"runs a backward after step {self.clock.step}")
                raise
        if inputs is None or self.masters.trains(asked):
            self._last = weakref.ref(loss)
            self._count(loss.detach().float().reshape(()))

    @contextmanager
    def scheduled(self, n_microbatches: int) -> Iterator[Losses]:
        """The context for one run of a schedule of ``torch.distributed.pipelining``.

        The schedule's backwards accumulate unscaled gradients in ``p.grad``, as :meth:`backward`
        does. The step's loss is the mean over micro-batches, of which a schedule makes gradients
        where ``scale_grads`` is True, as by default. Hooks on parameters see scaled gradients.

        Args:
            n_microbatches: The schedule's number of micro-batches.

        Example::

            with precision.scheduled(4) as loss:
                schedule = schedule or ScheduleGPipe(stage, 4, loss_fn=loss(loss_fn))
                schedule.step(batch, target=target)
            precision.step(max_norm=1.0)
        """
        self._require_open()
        scale, losses = self._scale(), self._losses
        accumulating = self.masters.accumulation.running(scale, None)
        with losses.running(scale), accumulating, self._context.arithmetic(), self.autocast():
            yield losses
        self._count(losses.mean(n_microbatches, self.device))

    def _scale(self) -> float:
        """The loss scale of a backward that begins."""
        self.masters.adopt()
        if not self.has_loss:
            self._loss = None  # its gradients have been cleared since
        if self.policy.loss_scale.kind == "dynamic":
            self.settle()  # the last step may have lowered the scale
        return self.outcome.progress.loss_scale.value

    def _count(self, loss: Tensor) -> None:
        """Count the loss of a backward that has ended."""
        self._begun += self._loss is None
        self._loss = loss if self._loss is None else self._loss + loss
        self.masters.note()

    @property
    def has_loss(self) -> bool:
        """Whether anything back-propagated waits for a step, and was not cleared."""
        return self._loss is not None and not self.masters.accumulation.cleared()

    def discard(self) -> None:
        """Drop everything back-propagated since the last step, as a ``zero_grad()`` of all does.

        Raises:
            PrecisionError: If another rank takes the step: all ranks leave one out, or none.
        """
        leaves = self.has_loss
        self._drop()
        if leaves and self.ranks.members:
            self._meet()
            self.ranks.leave_out()

    @outside_graphs
    def _drop(self) -> None:
        self.masters.clear()
        self._loss = self._last = None
        if self._context.casts_per_op:  # an open context must not reuse casts of the old weights
            drop_casts()

    @outside_graphs
    def close(self) -> None:
        """Release model and optimizers, whose hooks go; so does the end of a ``with`` block.

        Weights stay in the policy's format; gradients are dropped. Masters stay in the optimizers'
        states, which can still be saved, and nowhere else.
        """
        try:
            self.settle()
        finally:
            self._drop()
            self._steps.door.close()
            self._context.release()
            self._released()
            _give_back_(self.model)
            self.masters.close()

    @outside_graphs
    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None and self.ranks.members:
                tell(error)
                lost(error, self.ranks.members, f"runs its loop after step {self.clock.step}")
        finally:
            self.close()

    @outside_graphs
    def step(self, loss: Tensor | None = None, *, max_norm: float | None = None) -> StepResult:
        """Check, clip and apply the gradients, or skip the step; then clear them all.

        Args:
            loss: Passed to :meth:`backward` first; or left out.
            max_norm: Clip the global 2-norm of the gradients to this, or None.

        Raises:
            NonFiniteError: If a smaller loss scale cannot help. Weights and optimizer state are
                unchanged. On CUDA it may come with the result or the next call.
            SpikeError: If a finite loss or norm spikes, where ``on_spike`` says so; as above.
        """
        self._require_open()
        if max_norm is not None and not max_norm > 0:
            raise PrecisionError(f"max_norm={max_norm}; allowed: a number above 0, or None")
        if self.outcome.ema is not None:
            self.outcome.ema.require_own_weights()
        if loss is not None:
            if self._last is not None and self._last() is loss:
                raise PrecisionError(checks.TWICE)
            self.backward(loss)
        try:
            self.settle()
            total = self._loss
            if total is not None and not self.has_loss:  # as in torch, zero gradients are a step
                total = torch.zeros_like(total)
            if self.ranks.members:
                self._meet()
            return self._steps.take(total, max_norm)
        finally:
            self._drop()

    @outside_graphs
    def settle(self) -> None:
        """Wait for the last step on the device, and raise the NonFiniteError that it ended with."""
        if self.path is not None:
            self.path.settle()

    @property
    def progress(self) -> Progress:
        """The loss scale and the counts of steps after the last one, whose outcome it waits for."""
        self.settle()
        return self.outcome.progress

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale after the last step."""
        return self.progress.loss_scale

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer updates, by name; write weights, not these."""
        return self.masters.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's and the optimizers' state dicts."""
        self.settle()
        self.masters.adopt()
        return self.outcome.state()

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], *, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Continue exactly where :meth:`state_dict` was taken.

        Args:
            state: From :meth:`state_dict`.
            weights: The model's saved weights, by name. With them another policy's state is
                accepted: masters are converted, and a loss scale that does not fit starts afresh.
        """
        self.settle()
        self.masters.adopt()
        masters = checks.check_state(state, self.policy, self.named_parameters(), weights)
        self.outcome.load(state)
        self.clock.step = self.outcome.progress.steps
        if masters:
            self.masters.load_(masters)

    def _meet(self) -> None:
        progress = self.outcome.progress
        self.ranks.at(self._begun, progress.applied_total, progress.loss_scale.value)

    def _require_open(self) -> None:
        if not self._released.alive:
            raise PrecisionError(checks.CLOSED)


# Below this norm, squares of fp32 gradients may underflow (the smallest fp32 number is 2^-149).
_SQUARES_FIT = 1e-15
_STRANGER = "a tensor that is not the model's"


class _Steps:
    """The steps of a Precision: gradients are judged, applied or not, and counted."""

    def __init__(self, owner: Precision, door: _StepDoor) -> None:
        # not the Precision itself, which would then live until a garbage collection
        self._model, self._masters, self._ranks = owner.model, owner.masters, owner.ranks
        self._outcome = owner.outcome
        self._path, self._clock, self.door = owner.path, owner.clock, door

    def take(self, loss: Tensor | None, max_norm: float | None) -> StepResult:
        gradients = self._gradients(loss)
        assert loss is not None
        self._clock.step += 1
        path, decision = self._path, None
        if path is not None:
            decision = path.decide(loss, gradients, max_norm)
        if path is not None and decision is not None:
            self._update(gradients, decision)
            result = path.result(decision, gradients, self._learn)
            if self._outcome.waits:
                path.settle()
            return result
        judged = self.judge(loss, gradients)
        if judged.broken:
            return self._outcome.skipped(judged)
        self._update(gradients, clip_factor(judged.norm, max_norm))
        return self._applied(judged)

    def judge(self, loss: Tensor, gradients: Mapping[nn.Parameter, Tensor]) -> Judged:
        """Judge this rank's loss, and the gradient of each target; the host waits once.

        A finite step is tested for a spike, too. All ranks find the same: loss, norm and window are
        bit-equal on all of them.
        """
        by_share: dict[Share, list[Tensor]] = {}
        if isinstance(self._ranks, OneRank):
            by_share[Share()] = [*gradients.values()]
        else:
            for target, gradient in gradients.items():
                share = self._ranks.share_of(self._masters.parameter_of(target))
                by_share.setdefault(share, []).append(gradient)
        value, norm = self._ranks.measure(loss, by_share, self._norm)
        if not math.isfinite(value):
            return Judged(value, norm, None, whose=self._ranks.of_loss(loss))
        found = NonFinite((), ())
        if not math.isfinite(norm):
            named = zip(self._names(gradients), gradients.values(), strict=True)
            every = [*self._masters.named_parameters(), _STRANGER]
            found = self._ranks.union(find_nonfinite(named), every)
        if found.names:
            return Judged(value, norm, found)
        if not _SQUARES_FIT < norm < math.inf:
            _, norm = self._ranks.measure(loss, by_share, exact_global_norm)
        spikes = self._outcome.spikes
        spike = None if spikes is None else spikes.test(value, norm)
        return Judged(value, norm, found, spike)

    def _judged(self, decision: Decision) -> Judged:
        """The verdict that the device has given."""
        if not math.isfinite(decision.loss):
            return Judged(decision.loss, decision.norm, None)
        broken = decision.nonfinite
        named = [*zip(self._names(broken), broken.values(), strict=True)] if broken else []
        nan = tuple(name for name, is_nan in named if is_nan)
        inf = tuple(name for name, is_nan in named if not is_nan)
        return Judged(decision.loss, decision.norm, NonFinite(nan, inf))

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The global norm, by an optimizer's kernel if there is one and gradients are dense."""
        own = self._masters.own_optimizers
        if not own or any([gradient.is_sparse for gradient in gradients]):
            return global_norm(gradients)
        total: Tensor = own[0].norm(gradients)
        return total

    def _names(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """The model's names of these targets."""
        named = [*self._model.named_parameters(), *self._masters.named_parameters().items()]
        names = {parameter: name for name, parameter in named}
        return tuple(names.get(p, _STRANGER) for p in parameters)

    def _applied(self, judged: Judged) -> StepResult:
        result = self._outcome.progress.applied(judged)
        if self._outcome.follows:
            self._outcome.advance(judged)
        return result

    def _gradients(self, loss: Tensor | None) -> Gradients:
        try:
            if loss is None:
                raise PrecisionError(checks.NO_BACKWARD)
            self._masters.adopt()
            gradients = self._masters.gradients()
            if not gradients:
                raise PrecisionError(checks.NO_GRADIENTS)
        except PrecisionError as error:
            tell(error)
            self._ranks.cannot()
            raise
        return gradients

    def _update(self, gradients: Gradients, factor: float | DeviceDecision) -> None:
        self._masters.take_written_()
        with self.door.open():
            self._masters.update_(gradients, factor)

    def _learn(self, decision: Decision) -> StepResult:
        """Count a step that the device took or skipped, as if the host had decided about it."""
        judged = self._judged(decision)
        return self._outcome.skipped(judged) if judged.broken else self._applied(judged)


class _StepDoor:
    """An optimizer hook that refuses any step not made by the optimizer's own Precision."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_open = False
        self.begins: weakref.WeakMethod[Callable[[Optimizer], bool]] | None = None
        """Lets torch's initialisation step pass: :meth:`Exchange.begins`."""
        self._handles = [optimizer.register_step_pre_hook(self) for optimizer in optimizers]

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        begins = self.begins and self.begins()
        if not self._is_open and not (begins and begins(optimizer)):
            raise PrecisionError(
                f"{type(optimizer).__name__}.step() was called by hand (or by a GradScaler), and "
                "this optimizer belongs to a Precision, which checks, clips, rounds and scales the "
                "loss. Call precision.step(loss) instead, without a GradScaler; or "
                "precision.close() to go on without it"
            )

    @contextmanager
    def open(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _release(
    hooks: Sequence[RemovableHandle],
    door: _StepDoor | None,
    model: nn.Module | None,
) -> None:
    """Remove the hooks that must not outlive a Precision, where they would refuse later use."""
    if door is not None:
        door.close()
    for hook in hooks:
        hook.remove()
    drop_casts()  # which may hold the weights
    if model is not None:
        _give_back_(model)


def _give_back_(model: nn.Module) -> None:
    """Take the casts at a model's border off it, and what lets it be saved as a plain one."""
    give_back_(model)
    make_plain_(model)
