"""halfstep's precision plugin for Lightning's ``Trainer``; Fabric's is in ``fabric``.

It is given as ``Trainer(plugins=[...])``, not together with ``precision=``.
``docs/integrations-lightning.md`` is the how-to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.diagnostics.meter import LostUpdateMeter
from halfstep.diagnostics.nonfinite.first_cause import explained
from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.integrations.fabric import PolicyPlugin, check_strategy
from halfstep.precision.result import StepResult

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import Precision as LightningPrecision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
except ModuleNotFoundError as error:
    raise ConfigError(
        f"halfstep.integrations.lightning needs Lightning, and {error.name} is not installed: "
        "pip install 'halfstep[lightning]'"
    ) from error


class HalfstepPrecision(PolicyPlugin, LightningPrecision):
    """A whole halfstep policy: ``Trainer(plugins=[HalfstepPrecision("bf16-master")])``.

    The model keeps the policy's weights after ``fit``; ``trainer.save_checkpoint`` then still saves
    the exact masters. After ``validate``, ``test`` and ``predict`` its own weights are restored.
    """

    _idle = False  # whether the latest batches had no loss, and so no step

    def applied(self) -> bool:
        """Whether the latest optimizer step updated the weights; True before the first."""
        return not self._idle and (self.last_step is None or self.last_step.applied)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Put the model under the policy, or refuse, before the first step.

        Raises:
            PrecisionError: If policy, model, optimizer and strategy are incompatible.
        """
        module: Any = model if isinstance(model, LightningModule) else model.module
        check_strategy(module.trainer.strategy, self.policy)
        if module.trainer.state.fn != TrainerFn.FITTING:
            self.evaluate_(module)  # a strategy keeps an earlier fit's optimizers
            return model, optimizers, lr_schedulers
        if type(module).backward is not LightningModule.backward:
            raise PrecisionError(
                f"{type(module).__name__} has a backward() of its own, which the plugin would not "
                "call; compute with the loss in training_step, and use self.manual_backward(loss, "
                "retain_graph=True) for options"
            )
        self.train_(module, optimizers, model)
        for config in lr_schedulers if module.automatic_optimization else ():
            if config.interval == "step":
                config.scheduler = HeldScheduler(config.scheduler, self.applied)
        return model, optimizers, lr_schedulers

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Scale the loss and back-propagate, with the options of ``Precision.backward``."""
        self._ready().backward(tensor, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any]
    ) -> Any:
        """Run forward and backward, the hooks before a step, and the step.

        Where every ``training_step`` of an accumulation returned None there is no step.

        Raises:
            NonFiniteError: If continuing cannot help; its ``cause`` says why.
            PrecisionError: If gradients were made without the policy's backward.
        """
        output = closure()
        self._after_closure(model, optimizer)
        automatic = model.automatic_optimization
        self._idle = automatic and output is None and not self._ready().has_loss
        if self._idle:
            return output
        try:
            self.step_(optimizer)
        except NonFiniteError as error:
            if not automatic:  # the closure does nothing there
                raise
            raise explained(error, model, lambda *_: closure(), clear=model.zero_grad) from error
        return output

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients: by value at once, by norm within the step."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.clip_value_(optimizer, float(clip_val))
        else:  # manual optimization clips by Lightning's wrapper of the optimizer
            self._max_norms[getattr(optimizer, "optimizer", optimizer)] = float(clip_val)


class StepLog(Callback):
    """Log what each optimizer step did: loss scale, skips, gradient norm, lost updates, and why.

    ``PREFIXloss_scale``, ``PREFIXskipped`` (0 or 1), ``PREFIXskipped_total``, ``PREFIXgrad_norm``
    and ``PREFIXlost_updates`` (the newest measured) go to the Trainer's loggers; a skipped step's
    reason and parameters, which are text, to Lightning's console log.

    Args:
        prefix: Prefix of the logged names.
        prog_bar: Whether the progress bar shows the loss scale and the skipped steps.
        lost_updates_every: Measure lost updates on every this many applied steps; 0: never. Logged
            is the share of the parameter group that loses most.
    """

    def __init__(
        self,
        prefix: str = "halfstep/",
        *,
        prog_bar: bool = True,
        lost_updates_every: int = 50,
    ) -> None:
        self._prefix = prefix
        self._prog_bar = prog_bar
        self._every = lost_updates_every
        self._seen: StepResult | None = None
        self._meter: LostUpdateMeter | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure.

        Raises:
            ConfigError: If the Trainer has another precision plugin.
        """
        plugin = trainer.precision_plugin
        if not isinstance(plugin, HalfstepPrecision) or plugin.engine is None:
            raise ConfigError(
                "StepLog reads halfstep's precision plugin, and the Trainer has "
                f"{type(plugin).__name__}; allowed: Trainer(plugins=[HalfstepPrecision(...)])"
            )
        self._seen = None
        self._meter = LostUpdateMeter(plugin.engine, self._every)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log once per optimizer step."""
        plugin: Any = trainer.precision_plugin
        result: StepResult | None = plugin.last_step
        if result is None or result is self._seen:
            return
        self._seen = result
        shown = {"loss_scale": result.next_loss_scale, "skipped_total": result.skipped_total}
        silent = {"skipped": not result.applied, "grad_norm": result.grad_norm}
        if result.applied:
            silent |= self._lost()
        for values, bar in ((shown, self._prog_bar), (silent, False)):
            named = {f"{self._prefix}{key}": float(value) for key, value in values.items()}
            pl_module.log_dict(named, prog_bar=bar, on_step=True, on_epoch=False)
        if not result.applied:
            whose = ", ".join(result.nonfinite_parameters[:3]) or "not known"
            rank_zero_info(
                f"halfstep: step {trainer.global_step} skipped, {result.reason} in the gradients "
                f"of {whose}; loss {result.loss:g}, scale {result.loss_scale:g} -> "
                f"{result.next_loss_scale:g}, {result.skipped_total} skipped so far"
            )

    def _lost(self) -> dict[str, float]:
        """The lost updates of this step, if it was measured."""
        if self._meter is None or not self._meter.fresh:
            return {}
        shares = [report.lost for report in self._meter.report() if not math.isnan(report.lost)]
        return {"lost_updates": max(shares)} if shares else {}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop measuring."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None


class HeldScheduler:
    """A wrapper of a learning-rate scheduler that does not advance on a skipped step."""

    def __init__(self, scheduler: Any, applied: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._applied = applied

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the weights were updated."""
        if self._applied():
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Get any other attribute from the wrapped scheduler."""
        if name == "_scheduler":  # while being copied
            raise AttributeError(name)
        return getattr(self._scheduler, name)
