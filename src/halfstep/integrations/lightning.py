"""halfstep's precision plugins for Lightning's ``Trainer``; Fabric's are in ``fabric``.

Two of them, given as ``Trainer(plugins=[...])`` and not together with ``precision=``:

* :class:`HalfstepPrecision`: a whole policy, with :class:`halfstep.Precision` taking the steps.
* :class:`ScaledPrecision`: Lightning's own fp16 autocast with :class:`halfstep.GradScaler`.

``docs/integrations-lightning.md`` is the how-to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from halfstep.diagnostics.capture import Replayed, read_capture, take_again
from halfstep.diagnostics.nonfinite.first_cause import explained
from halfstep.diagnostics.recording.recorder import Recorder
from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.integrations.lightning_common import (
    PolicyPlugin,
    ScaledSteps,
    check_strategy,
    loss_with_backward,
)
from halfstep.integrations.optimizer_tensors import name_table
from halfstep.precision.result import StepResult

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins import MixedPrecision, Precision as LightningPrecision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError as error:
    raise ConfigError(
        f"halfstep.integrations.lightning needs Lightning, and {error.name} is not installed: "
        "pip install 'halfstep[lightning]'"
    ) from error

_HOOK, _CLIPPING = "on_before_optimizer_step", "configure_gradient_clipping"


class HalfstepPrecision(PolicyPlugin, LightningPrecision):
    """A whole halfstep policy: ``Trainer(plugins=[HalfstepPrecision("bf16-master")])``.

    The model keeps the policy's formats after ``fit``; ``trainer.save_checkpoint`` then saves the
    exact masters too. After ``validate``, ``test`` and ``predict`` without a ``fit`` its own
    weights are restored.
    """

    _watched = False
    _plain = False  # no optimizer, or one that needs no Precision: fp32 weights without a scale

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Put the model under the policy, or refuse, before the first step.

        Raises:
            PrecisionError: If policy, model, optimizer, strategy and callbacks are incompatible.
        """
        module: Any = model if isinstance(model, LightningModule) else model.module
        trainer = module.trainer
        check_strategy(trainer.strategy, self.policy)
        if trainer.state.fn != TrainerFn.FITTING:  # a strategy keeps an earlier fit's optimizers
            self.evaluate_(module)
            return model, optimizers, lr_schedulers
        self._check(trainer, module)
        used = [o for o in optimizers if o.param_groups]  # configure_optimizers may give None
        lbfgs = len(used) == 1 and isinstance(used[0], LBFGS)  # it calls the loss several times
        low = self.policy.param_dtype != torch.float32 or self.policy.loss_scale.kind != "none"
        self._plain = not used or (lbfgs and not low)
        if self._plain:
            self.evaluate_(module)
        else:
            self.train_(module, used, model)
        self._watched = any(
            is_overridden(_HOOK, callback, Callback) for callback in trainer.callbacks
        ) or any(is_overridden(hook, module) for hook in (_HOOK, _CLIPPING))
        if module.automatic_optimization:
            lr_schedulers = hold_on_skip(lr_schedulers, self.applied)
        return model, optimizers, lr_schedulers

    def _check(self, trainer: Any, module: Any) -> None:
        if self.policy.keeps_more_than_weights:
            for callback in trainer.callbacks:
                if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                    raise PrecisionError(
                        f"{type(callback).__name__} averages the model's 16-bit weights, not the "
                        f"exact ones of policy {self.policy}; leave it out, or use "
                        "bf16-mixed or fp16-mixed"
                    )

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Scale the loss and back-propagate, through the module's own ``backward`` hook."""
        if self._plain:
            model.backward(tensor, *args, **kwargs)
            return
        model.backward(loss_with_backward(tensor, self.backward_), *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] = lambda: None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run forward and backward, the hooks before a step, and the step.

        The hooks see unscaled gradients. Without a backward (every ``training_step`` of an
        accumulation returned None) there is no step.

        Raises:
            NonFiniteError: If continuing cannot help; its ``cause`` says why.
            PrecisionError: If gradients were made without the policy's backward.
        """
        if self._plain:
            return self._plain_step(optimizer, model, closure, kwargs)
        if kwargs:
            raise PrecisionError(
                f"optimizer.step({', '.join(kwargs)}=...): allowed is step(closure=...) alone"
            )
        output = closure()
        if model.automatic_optimization and not self.has_backward():
            self._applied = False
            self._after_closure(model, optimizer)
            return output
        if self._watched:
            with self.unscaled(optimizer):
                self._after_closure(model, optimizer)
        else:
            self._after_closure(model, optimizer)
        try:
            self.step_(optimizer)
        except NonFiniteError as error:
            raise _explained(error, model, closure) from error
        return output

    def _plain_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], options: dict[str, Any]
    ) -> Any:
        """A step without an optimizer, or of one that evaluates the loss several times."""

        def checked() -> Any:
            output = self._wrap_closure(model, optimizer, closure)
            if isinstance(output, Tensor) and not bool(output.isfinite()):
                raise NonFiniteError(
                    f"the loss is {output.item()} within a step of {type(optimizer).__name__}: the "
                    "forward pass, the data or the step so far made it; the weights are somewhere "
                    "on its way",
                    cause="forward",
                )
            return output

        self.attempts += 1
        return optimizer.step(closure=checked, **options)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the unscaled gradients: by value at once, by norm within the step."""
        if self._plain:
            LightningPrecision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
            return
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.clip_value_(optimizer, float(clip_val))
        else:
            self.clip_norm(float(clip_val))

    def teardown(self) -> None:
        """Restore the own weights of a model that was only evaluated."""
        self.give_back_()


class ScaledPrecision(ScaledSteps, MixedPrecision):
    """Lightning's ``16-mixed`` with :class:`halfstep.GradScaler`; on a CPU too.

    Weights, gradients and scales are bit for bit those of Lightning's own plugin. In addition,
    schedulers of interval "step" hold on skipped steps, a loss that is not finite stops the run
    instead of being skipped, gradients may be clipped with fused optimizers, and ``last_step``
    says what happened.

    Args:
        scaler: A scaler with your options; None: ``GradScaler(device, strict=True)``.
        device: ``"cuda"`` or ``"cpu"``; None: the scaler's, else ``"cuda"``.
    """

    _none = False  # whether the latest batch had no loss

    def applied(self) -> bool:
        """Whether the latest optimizer step updated the weights; True before the first."""
        result = self.last_step
        return not self._none and (result is None or result.applied)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Refuse 16-bit trainable weights and strategies with scalers of their own.

        Raises:
            PrecisionError: Naming the parameters or the strategy.
        """
        module: Any = model if isinstance(model, LightningModule) else model.module
        check_strategy(module.trainer.strategy, "16-mixed")
        self.scaler._names = self.scaler._names or name_table(module.named_parameters())
        for optimizer in optimizers:
            self.scaler.check(optimizer)
        if module.automatic_optimization:
            lr_schedulers = hold_on_skip(lr_schedulers, self.applied)
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss, and remember it."""
        self._add_loss(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] = lambda: None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Step as Lightning does; the hooks see unscaled gradients for fused optimizers too.

        Raises:
            NonFiniteError: If the loss was not finite, or the scaler's options say so.
        """
        self._refuse_lbfgs(optimizer)
        output = closure()
        self._none = output is None and bool(model.automatic_optimization)
        if self._none:  # as Lightning: what was accumulated before is dropped, too
            self._loss = None
            self._after_closure(model, optimizer)
            return output
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        try:
            return self._scaled_step(optimizer, kwargs)
        except NonFiniteError as error:
            raise _explained(error, model, closure) from error

    # Fused optimizers too, which Lightning's own plugin refuses: they are unscaled by then.
    clip_gradients = LightningPrecision.clip_gradients


def _explained(error: NonFiniteError, model: Any, closure: Callable[[], Any]) -> NonFiniteError:
    """The error with its first cause: the closure runs the step's last micro-batch again."""
    if not model.automatic_optimization:
        return error  # the closure does nothing there
    return explained(error, model, lambda *_: closure(), clear=model.zero_grad)


class StepLog(Callback):
    """Log what each optimizer step did: loss scale, skipped steps, gradient norm, and why.

    ``PREFIXloss_scale``, ``PREFIXskipped`` (0 or 1), ``PREFIXskipped_total`` and, with
    :class:`HalfstepPrecision`, ``PREFIXgrad_norm`` go to the Trainer's loggers; a skipped step's
    reason and parameters, which are text, to Lightning's console log.

    Args:
        prefix: Prefix of the logged names.
        prog_bar: Whether the progress bar shows the loss scale and the skipped steps.
        folder: With :class:`HalfstepPrecision`: also write a line for each training batch that took
            a step, and the batches of spikes, there, for ``halfstep report``.
        captures: How many captures to keep in it of steps that no loss scale can help, or that
            spike; :func:`replay` takes one again.
    """

    def __init__(
        self,
        prefix: str = "halfstep/",
        *,
        prog_bar: bool = True,
        folder: str | Path = "",
        captures: int = 0,
    ) -> None:
        if captures and not folder:
            raise ConfigError(f"captures={captures} without a folder; say where: folder='run'")
        self._prefix = prefix
        self._prog_bar = prog_bar
        self._seen = 0
        self._folder, self._captures = folder, captures
        self._recorder: Recorder | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer without one of halfstep's plugins.

        Raises:
            ConfigError: If there is none.
        """
        if not isinstance(trainer.precision_plugin, HalfstepPrecision | ScaledPrecision):
            raise ConfigError(
                "StepLog reads halfstep's precision plugin, and the Trainer has "
                f"{type(trainer.precision_plugin).__name__}; allowed: "
                "Trainer(plugins=[HalfstepPrecision(...)]) or ScaledPrecision"
            )
        if self._folder and not isinstance(trainer.precision_plugin, HalfstepPrecision):
            raise ConfigError(
                f"StepLog(folder={str(self._folder)!r}) with ScaledPrecision, which measures no "
                "norm and keeps no state to take a step again; allowed: HalfstepPrecision"
            )
        self._seen = trainer.precision_plugin.attempts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder."""
        engine = getattr(trainer.precision_plugin, "engine", None)
        if not self._folder:
            return
        if engine is None:
            raise ConfigError(
                f"StepLog(folder={str(self._folder)!r}) of a training whose steps halfstep does "
                "not take: no optimizer, or LBFGS; leave folder out"
            )
        self._recorder = Recorder(engine, self._folder, captures=self._captures)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch until its step."""
        if self._recorder is not None:
            self._recorder.batch(batch, epoch=trainer.current_epoch, batch_idx=batch_idx)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the line of the step that ended the training."""
        if self._recorder is not None:
            self._recorder.__exit__(type(exception), exception, None)
            self._recorder = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the folder's files."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log once per optimizer step."""
        plugin: Any = trainer.precision_plugin
        if plugin.attempts == self._seen:
            return
        self._seen = plugin.attempts
        result: StepResult | None = plugin.last_step
        if result is None:
            return
        if self._recorder is not None:
            self._recorder.step(result)
        shown = {"loss_scale": result.next_loss_scale, "skipped_total": result.skipped_total}
        silent = {"skipped": 0.0 if result.applied else 1.0}
        if isinstance(plugin, HalfstepPrecision):
            silent["grad_norm"] = result.grad_norm
        for values, bar in ((shown, self._prog_bar), (silent, False)):
            named = {f"{self._prefix}{key}": float(value) for key, value in values.items()}
            pl_module.log_dict(named, prog_bar=bar, on_step=True, on_epoch=False)
        if not result.applied:
            whose = ", ".join(result.nonfinite_parameters[:3]) or "not known"
            rank_zero_info(
                f"halfstep: step {plugin.attempts} skipped, {result.reason} in the gradients of "
                f"{whose}; loss {result.loss:g}, scale {result.loss_scale:g} -> "
                f"{result.next_loss_scale:g}, {result.skipped_total} skipped so far"
            )


def replay(
    path: Path | str, module: LightningModule, optimizer: Optimizer, *, precision: str = ""
) -> Replayed:
    """Take a step that :class:`StepLog` captured again, by the module's ``training_step``.

    Args:
        path: A folder in ``captures/``.
        module: The same module, with any weights.
        optimizer: Its optimizer, which has not stepped.
        precision: The policy to take the step in; empty: the captured one.

    Raises:
        CheckpointError: If it is no capture, is damaged, or is of another module.
    """
    captured = read_capture(path)
    spike = "stop" if captured.values["guarded"] else "off"
    plugin = HalfstepPrecision(precision or captured.policy, on_spike=spike)
    plugin.train_(module, [optimizer], module)

    def run(batch: Any) -> None:
        with plugin.forward_context():
            output: Any = module.training_step(batch, 0)
        loss = output["loss"] if isinstance(output, Mapping) else output
        plugin.backward_(loss / len(captured.batches))

    engine = plugin._ready()
    try:
        return take_again(captured, engine, run)
    finally:
        engine.close()


# Learning-rate schedulers, stepped by a trainer, that do not advance on skipped steps.


class HeldScheduler:
    """A wrapper of a learning-rate scheduler that does not advance on a skipped step."""

    def __init__(self, scheduler: Any, applied: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._applied = applied

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The wrapped scheduler's class, for ``isinstance``."""
        return type(self._scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the weights were updated."""
        if self._applied():
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Get any other attribute from the wrapped scheduler."""
        if name == "_scheduler":  # while being copied
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def hold_on_skip(configs: list[Any], applied: Callable[[], bool]) -> list[Any]:
    """Make the schedulers that Lightning steps with the optimizer hold still on skipped steps."""
    for config in configs:
        if config.interval == "step" and type(config.scheduler) is not HeldScheduler:
            config.scheduler = HeldScheduler(config.scheduler, applied)
    return configs
