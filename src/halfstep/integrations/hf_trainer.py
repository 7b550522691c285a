"""halfstep inside the Transformers Trainer; ``docs/integrations.md`` is the how-to.

One line between ``Trainer(...)`` and ``train()``. What the Trainer's step looks like then::

    training_step     as before; the loss is kept
    clip              the scaler unscales first; the norm is kept
    before the step   a loss (or, without a scaler, a gradient) that is not finite: log it as it
                      is, look for its first cause, and stop. One transfer from the device
    optimizer.step    the scaler steps or skips; the Trainer holds its schedule on a skip
    log               loss_scale, skipped_steps, skip_reason and lost_updates go along
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from halfstep.diagnostics.lost_updates import LostUpdateMeter
from halfstep.errors import ConfigError, PrecisionError
from halfstep.integrations.accelerate import ScaleOptions, attach as attach_scaler, refuse_engine
from halfstep.integrations.loop_scaler import LoopScaler
from halfstep.integrations.stopped_step import stopped
from halfstep.precision.ranks import Ranks, ranks_of_this_process

try:  # an optional dependency, the extra "hf"
    from transformers import TrainerCallback
except ImportError as error:
    raise ConfigError(
        "halfstep.integrations.hf_trainer needs transformers; pip install 'halfstep[hf]'"
    ) from error

_LOG = logging.getLogger(__name__)
_NEEDED = ("accelerator", "args", "training_step", "log", "add_callback", "callback_handler")


def attach(
    trainer: Any,
    *,
    scaler: bool | None = None,
    lost_updates_every: int = 50,
    stop_on_nonfinite: bool = True,
    **options: Unpack[ScaleOptions],
) -> NumericsCallback:
    """Let a Trainer account for its steps, and stop at a NaN; before ``train()``.

    Sets ``args.logging_nan_inf_filter=False``, and says so: with True, the Trainer logs a mean of
    earlier losses, or 0.0, where the loss is NaN.

    Args:
        trainer: Not trained yet.
        scaler: Whether to put halfstep's loss scaler into it. None: if it trains in fp16. True
            is for fp32 with an fp16 autocast of the model's own.
        lost_updates_every: Measure lost updates on every this many applied steps; 0: never.
        stop_on_nonfinite: Raise before a step whose loss is not finite, or whose gradients are
            not where there is no scaler to skip it. False: they are shown, and training goes on.
        options: The scaler's: :class:`halfstep.integrations.accelerate.ScaleOptions`.

    Returns:
        The callback that was added; ``callback.scaler`` is the scaler, or None.

    Raises:
        ConfigError: If it is no Trainer, or attached or trained already; or if options of a scaler
            come without one.
        PrecisionError: If its precision or its engine leaves no room for a loss scaler.
    """
    _check(trainer)
    wanted = trainer.accelerator.mixed_precision == "fp16" if scaler is None else scaler
    if options and not wanted:
        raise ConfigError(
            f"attach() got {', '.join(sorted(options))}, but this Trainer has no loss scaler: it "
            f"trains with mixed_precision={trainer.accelerator.mixed_precision!r}. Leave them out, "
            "or say scaler=True with an fp16 autocast of your own"
        )
    ranks = options.get("ranks")
    used = attach_scaler(trainer.accelerator, **options) if wanted else None
    callback = NumericsCallback(trainer, used, lost_updates_every, ranks, stop=stop_on_nonfinite)
    trainer.log = callback.with_numbers(trainer.log)
    trainer.training_step = callback.keeping_loss(trainer.training_step)
    trainer.accelerator.clip_grad_norm_ = callback.keeping_norm(trainer.accelerator.clip_grad_norm_)
    trainer.add_callback(callback)
    if trainer.args.logging_nan_inf_filter:
        trainer.args.logging_nan_inf_filter = False
        _LOG.warning("args.logging_nan_inf_filter is now False: a NaN loss is logged as NaN")
    return callback


class NumericsCallback(TrainerCallback):
    """What :func:`attach` installs; it has no use without it.

    Attributes:
        scaler: The loss scaler, or None.
        meter: The :class:`halfstep.LostUpdateMeter` of the training that runs, or ran; or None.
    """

    def __init__(
        self,
        trainer: Any,
        scaler: LoopScaler | None,
        every: int,
        ranks: Ranks | None,
        *,
        stop: bool,
    ) -> None:
        self.scaler = scaler
        self.meter: LostUpdateMeter | None = None
        self._trainer = trainer
        self._accelerator = trainer.accelerator
        self._every = every
        self._ranks = ranks
        self._stop = stop
        self._scaled = trainer.accelerator.scaler is not None  # then it skips broken gradients
        self._micro: list[tuple[Tensor, Any]] = []  # loss and inputs since the last step
        self._norm: Tensor | float | None = None
        self._reason: str | None = None  # of the newest skip since the last log
        self._measured = 0  # the step whose lost updates were logged

    def keeping_loss(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The Trainer's ``training_step``, with every micro-batch's loss kept for the step."""

        def step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(model, inputs, *args, **kwargs)
            self._micro.append((loss.detach(), inputs))
            return loss

        return step

    def keeping_norm(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Accelerate's ``clip_grad_norm_``, with the norm it gives kept for the step."""

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._norm = clip(*args, **kwargs)
            return self._norm

        return clip_grad_norm_

    def with_numbers(self, log: Callable[..., None]) -> Callable[..., None]:
        """The Trainer's ``log``, with our numbers in what is logged of training."""

        def log_numbers(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs or "train_loss" in logs:
                logs.update(self.numbers())
            log(logs, *args, **kwargs)
            if not math.isfinite(logs.get("loss", 0.0)):
                self._restart_mean()

        return log_numbers

    def _restart_mean(self) -> None:
        """The Trainer empties its sum of losses by ``sum -= sum``, which a NaN outlives."""
        total = getattr(self._trainer, "_tr_loss", None)
        if isinstance(total, Tensor):
            total.zero_()

    def numbers(self) -> dict[str, float | str]:
        """What is new since the last call: see ``docs/integrations.md``."""
        found: dict[str, float | str] = {}
        if self.scaler is not None:
            found["loss_scale"] = self.scaler.get_scale()
            found["skipped_steps"] = self.scaler.skipped_total
        if self._reason is not None:
            found["skip_reason"], self._reason = self._reason, None
        reports = () if self.meter is None else self.meter.report()
        known = [r for r in reports if r.step > self._measured and not math.isnan(r.lost)]
        if known:
            self._measured = max(report.step for report in known)
            updates = sum(r.elements * (1 - r.zero) for r in known)
            lost = sum(r.lost * r.elements * (1 - r.zero) for r in known)
            found["lost_updates"] = lost / updates if updates else 0.0
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch this training's optimizer.

        Raises:
            ConfigError: If the Trainer has made another Accelerator since :func:`attach`.
        """
        if self._trainer.accelerator is not self._accelerator:
            raise ConfigError(
                "the Trainer has made another Accelerator since attach(), as hyperparameter_search "
                "does, and halfstep is not in it; attach() to a Trainer of its own in each trial"
            )
        self._forget()
        if self.meter is not None:
            self.meter.close()
        optimizer = kwargs["optimizer"]
        while hasattr(optimizer, "step_was_skipped"):  # Accelerate's wrapper
            optimizer = optimizer.optimizer
        skipped = 0 if self.scaler is None else self.scaler.skipped_total
        applied = self._measured = max(0, state.global_step - skipped)
        self.meter = LostUpdateMeter(optimizer, self._every, start=applied) if self._every else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop here, before anything is changed, if this step cannot be right.

        Raises:
            NonFiniteError: Of cause ``"forward"`` for the loss, ``"gradients"`` for gradients.
            PrecisionError: If gradients were clipped before they were unscaled.
        """
        if self.scaler is not None and self._norm is None and args.max_grad_norm:
            raise PrecisionError(
                "this Trainer clips gradients without Accelerate, as expert parallelism does, so "
                "before they are unscaled; set max_grad_norm=0, or train in bf16"
            )
        if not self._stop or not self._micro:
            self._micro, self._norm = [], None
            return
        losses = [loss for loss, _ in self._micro]
        norm = 0.0 if self._scaled or self._norm is None else self._norm
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
        device = losses[0].device
        values = torch.stack([v.double().reshape(()).to(device) for v in (*losses, whole)]).tolist()
        loss_broken = not all(map(math.isfinite, values[:-1]))
        broken = self._agreeing(device).worst([loss_broken, not math.isfinite(values[-1])])
        if any(broken):
            self._trainer.log({"loss": sum(values[:-1]), "grad_norm": _number(self._norm)})
            micro, step = self._micro, state.global_step + 1
            self._forget()
            raise stopped(self._trainer, step, micro, values, of_loss=bool(broken[0]))
        self._micro, self._norm = [], None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the reason, if the scaler has skipped this step."""
        last = None if self.scaler is None else self.scaler.last_step
        if last is not None and not last.applied:
            self._reason = last.reason

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off the optimizer."""
        if self.meter is not None:
            self.meter.close()

    def _agreeing(self, device: torch.device) -> Ranks:
        return ranks_of_this_process(device) if self._ranks is None else self._ranks

    def _forget(self) -> None:
        self._micro, self._norm = [], None
        if self.scaler is not None:
            self.scaler.abandon()


def _number(norm: Any) -> float:
    """Of a norm that may be a tensor, of any kind, or not known."""
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return math.nan if whole is None else float(whole)


def _check(trainer: Any) -> None:
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"attach() got a {type(trainer).__name__} without {', '.join(missing)}; allowed: a "
            "transformers.Trainer of version 5, or a subclass of it"
        )
    refuse_engine(trainer.accelerator)
    if any(isinstance(c, NumericsCallback) for c in trainer.callback_handler.callbacks):
        raise ConfigError("attach() was called for this Trainer already; call it once")
    if trainer.accelerator._optimizers:
        raise ConfigError(
            "attach() came after train(): the optimizer holds another scaler already. Call it "
            "right after Trainer(...)"
        )
