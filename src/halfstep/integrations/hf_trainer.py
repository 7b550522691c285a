"""halfstep inside the Transformers Trainer; ``docs/integrations.md`` is the how-to.

Call :func:`attach` between ``Trainer(...)`` and ``train()``. The Trainer's step then does this::

    training_step     as before; the loss is recorded
    clip              the scaler unscales first; the norm is recorded
    before the step   if a loss (or, without a scaler, a gradient) is not finite: log it as it is,
                      search for its first cause, and stop. One transfer from the device
    optimizer.step    the scaler steps or skips; the Trainer holds its schedule on a skip
    log               adds loss_scale, skipped_steps, skip_reason and lost_updates
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from halfstep.diagnostics.health import LayerHealth
from halfstep.diagnostics.lost_updates import LostUpdateMeter, bare_optimizer
from halfstep.diagnostics.nonfinite.first_cause import explain_, searched
from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.integrations.accelerate import (
    ScaleOptions,
    attach as attach_scaler,
    refuse_engine,
    refuse_scale_options,
)
from halfstep.integrations.loop_scaler import LoopScaler
from halfstep.integrations.optimizer_tensors import refuse_pure
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.checks import some
from halfstep.precision.masters.local_part import is_sharded, local_part
from halfstep.precision.scaling.gradients import OneRank, Ranks, find_nonfinite

_LOG = logging.getLogger(__name__)


def attach(
    trainer: Any,
    *,
    scaler: bool | None = None,
    lost_updates_every: int = 50,
    health_every: int = 100,
    **options: Unpack[ScaleOptions],
) -> NumericsCallback:
    """Make a Trainer report its steps, and stop at a NaN; call it before ``train()``.

    Training stops before a step whose loss is not finite, or, without a scaler to skip it, whose
    gradients are not. ``args.logging_nan_inf_filter`` is set to False: a NaN loss is logged as NaN.

    Args:
        trainer: A Trainer that has not trained yet.
        scaler: Whether to install halfstep's loss scaler. None: if the Trainer trains in fp16. True
            is for fp32 with an fp16 autocast of the model's own.
        lost_updates_every: Measure lost updates on every this many applied steps; 0: never.
        health_every: Compare each layer with its own past on every this many steps; 0: never. The
            first that leaves it is told by a warning (:class:`halfstep.LayerHealth`).
        options: The scaler's options (:class:`halfstep.integrations.accelerate.ScaleOptions`);
            ``allow_pure``, ``names`` and ``ranks`` are also allowed without a scaler.

    Returns:
        The callback that was added; ``callback.scaler`` is the scaler, or None.

    Raises:
        ConfigError: If it is not a Trainer, is already attached or trained, or if scaler options
            are given without a scaler.
        PrecisionError: If its precision or engine does not allow a loss scaler. ``train`` raises it
            for 16-bit weights whose small updates would be lost, unless ``allow_pure=True``.
    """
    _check(trainer)
    wanted = trainer.accelerator.mixed_precision == "fp16" if scaler is None else scaler
    if not wanted:
        refuse_scale_options(trainer.accelerator, options)
    callback = NumericsCallback(trainer, wanted, lost_updates_every, options)
    callback.health_every = health_every
    callback.install()
    trainer.log, trainer.training_step = callback.log, callback.training_step
    trainer.create_accelerator_and_postprocess = callback.begin_trial
    trainer.add_callback(callback)
    if trainer.args.logging_nan_inf_filter:
        trainer.args.logging_nan_inf_filter = False
        _LOG.warning("args.logging_nan_inf_filter is now False: a NaN loss is logged as NaN")
    return callback


class NumericsCallback(TrainerCallback):
    """The callback that :func:`attach` installs; do not use it directly.

    Attributes:
        scaler: The loss scaler, or None.
        meter: The :class:`halfstep.LostUpdateMeter` of the current or last training, or None.
        health: Its :class:`halfstep.LayerHealth`, or None.
    """

    health: LayerHealth | None = None
    health_every = 0

    def __init__(
        self,
        trainer: Any,
        wanted: bool,
        every: int,
        options: ScaleOptions,
    ) -> None:
        self.scaler: LoopScaler | None = None
        self.meter: LostUpdateMeter | None = None
        self._trainer, self._wanted, self._options = trainer, wanted, options
        self._log, self._training_step = trainer.log, trainer.training_step
        self._new_accelerator = trainer.create_accelerator_and_postprocess
        self._every = every
        self._micro: list[tuple[Tensor, Any]] = []  # loss and inputs since the last step
        self._norm: Any = None  # which clipping has found since the last step
        self._reason: str | None = None  # of the newest skip since the last log
        self._measured = 0  # the step whose lost updates were logged

    def install(self) -> None:
        """Put the scaler, and the recording of norms, into the Trainer's Accelerator."""
        accelerator = self._trainer.accelerator
        if self._wanted:
            self.scaler = attach_scaler(accelerator, scaler=True, **self._options)
        self._scaled = accelerator.scaler is not None  # which skips broken gradients
        self._clip = accelerator.clip_grad_norm_
        accelerator.clip_grad_norm_ = self.clip

    def begin_trial(self) -> None:
        """Make another Accelerator, as ``hyperparameter_search`` does, with halfstep in it."""
        self._new_accelerator()
        self.install()

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's own, and record the micro-batch's loss for the step."""
        loss: Tensor = self._training_step(model, inputs, *args, **kwargs)
        self._micro.append((loss.detach(), inputs))
        return loss

    def clip(self, *args: Any, **kwargs: Any) -> Any:
        """Clip as Accelerate does, and record the norm that it returns."""
        self._norm = self._clip(*args, **kwargs)
        return self._norm

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with :meth:`numbers` added during training."""
        if "loss" in logs or "train_loss" in logs:
            logs.update(self.numbers())
        self._log(logs, *args, **kwargs)
        total = getattr(self._trainer, "_tr_loss", None)
        if not math.isfinite(logs.get("loss", 0.0)) and isinstance(total, Tensor):
            total.zero_()  # the Trainer empties it by ``sum -= sum``, which a NaN outlives

    def numbers(self) -> dict[str, float | str]:
        """The values to log that are new since the last call: see ``docs/integrations.md``."""
        found: dict[str, float | str] = {}
        if self._scaled and self.scaler is not None:
            found["loss_scale"] = self.scaler.get_scale()
        if self.scaler is not None:
            found["skipped_steps"] = self.scaler.skipped_total
        if self._reason is not None:
            found["skip_reason"], self._reason = self._reason, None
        reports = () if self.meter is None else self.meter.report()
        known = [r for r in reports if r.step > self._measured and not math.isnan(r.lost)]
        if known:
            self._measured = max(report.step for report in known)
            updates = sum(r.updates for r in known)
            lost = sum(r.lost * r.updates for r in known)
            found["lost_updates"] = lost / updates if updates else 0.0
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check this training's optimizer and attach the meter to it.

        Raises:
            PrecisionError: If small updates of 16-bit weights would be lost.
        """
        self._forget()
        self.on_train_end(args, state, control)
        optimizer = bare_optimizer(kwargs["optimizer"])
        if not self._options.get("allow_pure", False):
            refuse_pure(optimizer, {p: name for name, p in self._trainer.model.named_parameters()})
        skipped = 0 if self.scaler is None else self.scaler.skipped_total
        applied = self._measured = max(0, state.global_step - skipped)
        self.meter = LostUpdateMeter(optimizer, self._every, start=applied) if self._every else None
        if self.health_every:
            self.health = LayerHealth(
                self._trainer.model, optimizer, scaler=self._trainer.accelerator.scaler,
                every=self.health_every, start=state.global_step,
            )  # fmt: skip

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, before anything is changed, if the loss or the gradients are not finite.

        Raises:
            NonFiniteError: With cause ``"forward"`` for the loss, ``"gradients"`` for gradients.
            PrecisionError: If gradients were clipped before they were unscaled.
        """
        scaled = self._scaled and self.scaler is not None
        if scaled and self._norm is None and args.max_grad_norm:
            raise PrecisionError(
                "this Trainer clips gradients without Accelerate, as expert parallelism does, so "
                "before they are unscaled; set max_grad_norm=0, or train in bf16"
            )
        micro, norm = self._micro, self._norm
        self._micro, self._norm = [], None
        if not micro:
            return
        losses = [loss for loss, _ in micro]
        whole = torch.as_tensor(0.0 if norm is None else _whole(norm))
        device = losses[0].device
        values = torch.stack([v.double().reshape(()).to(device) for v in (*losses, whole)]).tolist()
        loss_broken = not all(map(math.isfinite, values[:-1]))
        norm_broken = not self._scaled and not math.isfinite(values[-1])
        held = self._trainer.model
        agreed = ranks_of_this_process(device, self._options.get("ranks"), held)
        broken = agreed.worst([loss_broken, norm_broken])
        if any(broken):
            shown = math.nan if norm is None else float(_whole(norm))
            self._trainer.log({"loss": sum(values[:-1]), "grad_norm": shown})
            self._forget()
            step = state.global_step + 1
            raise stopped(self._trainer, step, micro, values, agreed, of_loss=bool(broken[0]))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the reason if the scaler has skipped this step."""
        last = None if self.scaler is None else self.scaler.last_step
        if last is not None and not last.applied:
            self._reason = last.reason

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks from the optimizer."""
        for one in (self.meter, self.health):
            if one is not None:
                one.close()

    def _forget(self) -> None:
        self._micro, self._norm = [], None
        if self.scaler is not None:
            self.scaler.release()


def _whole(norm: Any) -> Any:
    """The whole of a norm that may be a number, a tensor or a distributed tensor."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _check(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"attach() got a {type(trainer).__name__}; allowed: a transformers.Trainer"
        )
    refuse_engine(trainer.accelerator)
    if any(isinstance(c, NumericsCallback) for c in trainer.callback_handler.callbacks):
        raise ConfigError("attach() was called for this Trainer already; call it once")
    if trainer.accelerator._optimizers:
        raise ConfigError(
            "attach() came after train(): the optimizer holds another scaler already. Call it "
            "right after Trainer(...)"
        )


# Why a Trainer's step was not taken: which micro-batch, which parameters, which operation.


def stopped(
    trainer: Any,
    step: int,
    micro: Sequence[tuple[Tensor, Any]],
    values: Sequence[float],
    agreed: Ranks,
    *,
    of_loss: bool,
) -> NonFiniteError:
    """The error for a step that is not finite, with its first cause if that can be found.

    The Trainer is before its optimizer's step, whose number is from 1; ``values`` are the losses
    of the micro-batches, and the norm of the gradients. The gradients are cleared.
    """
    named = dict(trainer.model.named_parameters())
    weights = find_nonfinite((n, local_part(p)) for n, p in named.items()).names
    broken = _broken_gradients(named)
    trainer.model.zero_grad()
    index = next((i for i, v in enumerate(values[:-1]) if not math.isfinite(v)), None)
    first: tuple[Any, str] = (None, "")
    anew: list[tuple[str, ...]] = []
    loss = torch.zeros_like(micro[0][0]) if index is None else micro[index][0]
    what = agreed.of_loss(loss.reshape(())) if of_loss else ""
    # one rank's weights alone may be broken; a forward that gathers weights would hang alone
    if not agreed.worst([int(bool(weights))])[0] and (
        isinstance(agreed, OneRank) or not any(map(is_sharded, named.values()))
    ):

        def run(_: int, inputs: Any) -> None:
            trainer.compute_loss(trainer.model, dict(inputs)).backward()
            anew.append(_broken_gradients(named))

        first = searched(trainer.model, run, [dict(inputs) for _, inputs in micro])
        broken = next(filter(None, anew), broken)  # clipping spreads a NaN over all gradients
    if of_loss:
        if index is not None and len(micro) > 1:
            what += f" in micro-batch {index + 1} of {len(micro)}"
        source = "the forward pass or the data made it"
    else:
        what = f"the norm of the gradients is {values[-1]} with a finite loss"
        source = f"not finite in {some(broken) or 'no gradient of this rank'}"
    if weights:
        source = f"the weights {some(weights)} are not finite"
    error = NonFiniteError(
        f"step {step}: {what}: {source}; the step was not taken, the weights are those after step "
        f"{step - 1}",
        cause="forward" if of_loss else "gradients",
        parameters=weights if weights or of_loss else broken,
    )
    return explain_(error, first)


def _broken_gradients(named: Mapping[str, Tensor]) -> tuple[str, ...]:
    return find_nonfinite(
        (name, local_part(p.grad)) for name, p in named.items() if p.grad is not None
    ).names
