"""halfstep's precision plugin for Lightning's ``Trainer``.

It is given as ``Trainer(plugins=[...])``, not together with ``precision=``.
``docs/integrations-lightning.md`` is the how-to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.plugins import Precision as LightningPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.diagnostics.health import LayerHealth
from halfstep.diagnostics.lost_updates import LostUpdateMeter
from halfstep.diagnostics.nonfinite.first_cause import explain_, searched
from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.integrations.optimizer_tensors import owned
from halfstep.precision.casting.autocast import Autocast
from halfstep.precision.casting.cast import (
    Region,
    cast_at_border,
    cast_floating,
    cast_to_policy_,
    give_back_,
)
from halfstep.precision.checks import NO_BACKWARD, one_device, some
from halfstep.precision.masters.local_part import fsdp_parameters, reshard_, set_
from halfstep.precision.policy.devices import default_device
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import OneRank
from halfstep.precision.step import Precision


class HalfstepPrecision(LightningPrecision):
    """A whole halfstep policy: ``Trainer(plugins=[HalfstepPrecision("bf16-master")])``.

    The model keeps the policy's weights after ``fit``; ``trainer.save_checkpoint`` then still saves
    the exact masters. After ``validate``, ``test`` and ``predict`` its own weights are restored.

    Attributes:
        policy: The precision policy.
        engine: The :class:`halfstep.Precision` that takes the steps; None outside a training.
        last_step: What the latest optimizer step did; None before the first.
    """

    def __init__(
        self,
        policy: str | PrecisionPolicy,
        *,
        on_nonfinite: str = "stop",
        on_spike: str = "off",
    ) -> None:
        """Parse the policy; the other options are those of :class:`halfstep.Precision`.

        ``auto`` is the policy of this machine's accelerator, since Lightning asks for a plugin's
        precision before it has a device.

        Raises:
            PrecisionError: If there is no such policy.
        """
        self.policy = parse_policy(policy, default_device())
        self.precision: Any = lightning_name(self.policy)
        self._options: Any = {"on_nonfinite": on_nonfinite, "on_spike": on_spike}
        self.engine: Precision | None = None
        self.last_step: StepResult | None = None
        self._model: nn.Module | None = None
        self._context: Autocast | nullcontext[None] | None = None
        self._outside = [False]  # whether a step runs, and no submodule's call in it
        self._own_weights: list[tuple[nn.Parameter, Tensor]] = []  # of a model under evaluation
        self._max_norms: dict[Optimizer, float] = {}  # to which the next steps clip
        self._state: dict[str, Any] = {}  # of a training that has ended
        self._idle = False  # whether the latest batches had no loss, and so no step

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
        strategy = type(module.trainer.strategy).__name__
        if strategy not in ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"):
            raise PrecisionError(
                f"strategy {strategy} shards weights or owns a loss scaler, so policy "
                f"{self.policy} cannot be honoured there; allowed: a single device, "
                "strategy='ddp', or ModelParallelStrategy(...), which shards by FSDP2"
            )
        if module.trainer.state.fn != TrainerFn.FITTING:
            self._evaluate(module)  # a strategy keeps an earlier fit's optimizers
            return model, optimizers, lr_schedulers
        kinds = (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)
        searching = [one for one in module.trainer.callbacks if isinstance(one, kinds)]
        if searching and self.policy.param_dtype != torch.float32:
            form = dtype_name(self.policy.compute_dtype)
            raise PrecisionError(
                f"{type(searching[0]).__name__} (lr_find, scale_batch_size) under policy "
                f"{self.policy} would leave the model's weights rounded to {form} for the training "
                f"after it. Search with Trainer(plugins=[HalfstepPrecision('{form}-mixed')]), then "
                f"train with {self.policy}"
            )
        if type(module).backward is not LightningModule.backward:
            raise PrecisionError(
                f"{type(module).__name__} has a backward() of its own, which the plugin would not "
                "call; compute with the loss in training_step, and use self.manual_backward(loss, "
                "retain_graph=True) for options"
            )
        self._train(module, optimizers)
        for config in lr_schedulers if module.automatic_optimization else ():
            if config.interval == "step":
                config.scheduler = HeldScheduler(config.scheduler, self.applied)
        return model, optimizers, lr_schedulers

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Scale the loss and back-propagate, with the options of ``Precision.backward``."""
        if isinstance(self._context, nullcontext):  # a search of a first cause compares with fp32
            tensor.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        else:
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
            self._step(optimizer)
        except NonFiniteError as error:
            if not automatic:  # the closure is empty: the user types it in training_step
                error.typed = error.typed.replace("(precision, your", "(self, your")
            elif isinstance(self._ready().ranks, OneRank):
                run, batch = _with_batch(closure)
                wide = partial(self._in_fp32, run) if self.policy.casts_per_op else None
                slower = self._ready().progress.slower
                explain_(error, searched(model, run, batch, wide=wide, slower=slower))
            raise
        return output

    def _in_fp32(self, run: Callable[[int, Any], float], number: int, part: Any) -> float:
        """Run a part of a batch without the policy's casts; its weights are in fp32."""
        context, self._context = self._context, nullcontext()
        try:
            return run(number, part)
        finally:
            self._context = context

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients: by value at once, by norm within the step."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
            # manual optimization clips by Lightning's wrapper of the optimizer
            self._max_norms[getattr(optimizer, "optimizer", optimizer)] = float(clip_val)
            return
        limit = float(clip_val)
        for parameter in owned(optimizer):
            gradient = parameter.grad
            if gradient is not None:  # what is not finite stays, to be found
                values = gradient._values() if gradient.is_sparse else gradient
                values.copy_(torch.where(values.isfinite(), values.clamp(-limit, limit), values))

    def _train(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Put a model and its optimizers under the policy.

        Raises:
            PrecisionError: As :class:`halfstep.Precision`; nothing has been changed then.
        """
        on_spike = self._options["on_spike"]
        if len(optimizers) > 1 and on_spike != "off":
            raise PrecisionError(
                f"on_spike={on_spike!r} with {len(optimizers)} optimizers, each of which "
                "takes steps of its own losses; allowed: one optimizer, or on_spike='off'"
            )
        self.engine = Precision(self.policy, model, optimizers, **self._options)
        self._take(model, self.engine.autocast())
        self.last_step, self._state, self._max_norms = None, {}, {}

    def _evaluate(self, model: nn.Module) -> None:
        """Put a model under the policy; :meth:`teardown` restores its own weights."""
        context = Autocast(self.policy, model, one_device(model))
        reshard_(model)
        own = [(parameter, parameter.detach()) for parameter in model.parameters()]
        cast_to_policy_(model, self.policy)
        cast_at_border(place(self.policy, model))
        self._own_weights = own
        self._take(model, context)

    def _take(self, model: nn.Module, context: Autocast) -> None:
        self._model, self._context = model, context
        dtype = self.policy.compute_dtype
        if dtype == torch.float32:
            return
        for module in model.modules():
            dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
            if dtypes and type(module).forward is not nn.Module.forward:
                low = module is not model and dtypes != {torch.float32}
                Border(module, self._outside, dtype if low else None).attach()

    def teardown(self) -> None:
        """Give the model back without hooks, and keep the state for a later checkpoint."""
        if self._model is None:
            return
        if self.engine is not None:
            device = one_device(self._model)  # Lightning has moved it, and moments, to the CPU
            for master in self.engine.named_parameters().values():
                master.data = master.data.to(device)
            try:
                self._state = self.engine.state_dict()
            finally:
                self.engine.close()
                self.engine = None
        else:
            give_back_(self._model)
            reshard_(self._model)
            sharded = fsdp_parameters(self._model)
            for parameter, value in self._own_weights:
                set_(parameter, value.to(parameter.device), sharded)
        self._model = self._context = None
        self._own_weights = []

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The context for a forward and its loss.

        Raises:
            PrecisionError: If no model was set up.
        """
        if self._context is None:
            raise PrecisionError("halfstep's precision plugin has no model yet")
        before, self._outside[0] = self._outside[0], True
        try:
            with self._context:
                yield
        finally:
            self._outside[0] = before

    def _ready(self) -> Precision:
        if self.engine is None:
            raise PrecisionError("halfstep's precision plugin has no model yet")
        return self.engine

    def _step(self, optimizer: Optimizer) -> None:
        """Check, clip and apply this optimizer's gradients, or skip; others' gradients wait."""
        engine, max_norm = self._ready(), self._max_norms.pop(optimizer, None)
        if engine._loss is None and isinstance(engine.ranks, OneRank):  # else they agree in it
            raise PrecisionError(NO_BACKWARD.replace("precision.", "self.manual_"))
        with _others_aside(engine, optimizer):
            self.last_step = engine.step(max_norm=max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's and the optimizers' state."""
        return self._state if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken; ignored outside a training."""
        if self.engine is not None:
            self.engine.load_state_dict(state_dict)


def _with_batch(closure: Callable[[], Any]) -> tuple[Callable[[int, Any], float], list[Any]]:
    """How to run a closure of Lightning's on a part of its batch, and the batch, if it is known.

    Lightning keeps the arguments of ``training_step``, by name, in the closure.
    """
    given: dict[str, Any] = getattr(getattr(closure, "_step_fn", None), "args", ({},))[0]

    def run(_: int, part: Any) -> float:
        whole = given.get("batch")
        given.update({"batch": part} if "batch" in given else {})
        try:
            return float(closure())
        finally:
            given.update({"batch": whole} if "batch" in given else {})

    return run, [given.get("batch")]


@contextmanager
def _others_aside(engine: Precision, optimizer: Optimizer) -> Iterator[None]:
    """Set the other optimizers' gradients, and the loss, aside during one optimizer's step."""
    others = {
        parameter: parameter.grad
        for other in engine.optimizers
        if other is not optimizer
        for parameter in owned(other)
        if parameter.grad is not None
    }
    loss = engine._loss
    for parameter in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in others.items():
            parameter.grad = gradient
        if others:
            engine._loss = loss


def lightning_name(policy: PrecisionPolicy) -> str:
    """Lightning's nearest name for a policy, for its summaries and logs alone."""
    if policy.compute_dtype == torch.float32:
        return "32-true"
    form = "bf16" if policy.compute_dtype == torch.bfloat16 else "16"
    return f"{form}-mixed" if policy.param_dtype == torch.float32 else f"{form}-true"


class Border(Region):
    """Casts at the outermost call of a submodule with parameters within a step.

    :class:`halfstep.Precision` casts at the border of ``model(...)``. A ``training_step`` calls
    ``self.net(x)`` instead, and computes the loss from its output: there the border is the
    outermost call of a submodule. Calls from within the model's own ``forward`` are not outermost,
    and neither is what activation checkpointing repeats during a backward.
    """

    def __init__(self, module: nn.Module, outside: list[bool], inputs: torch.dtype | None) -> None:
        super().__init__(module)
        self._outside, self._inputs = outside, inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; in the outermost call cast inputs to it, and to fp32."""
        repeats = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0
        if repeats or not self._outside[0]:
            return self.inside(args, kwargs)
        if self._inputs is not None:
            args, kwargs = cast_floating(args, self._inputs), cast_floating(kwargs, self._inputs)
        self._outside[0] = False
        try:
            output = self.inside(args, kwargs)
        finally:
            self._outside[0] = True
        return cast_floating(output, torch.float32)


class StepLog(Callback):
    """Log what each optimizer step did: loss scale, skips, gradient norm, lost updates, and why.

    ``halfstep/loss_scale``, ``halfstep/skipped`` (0 or 1), ``halfstep/skipped_total``,
    ``halfstep/grad_norm`` and ``halfstep/lost_updates`` (the newest measured) go to the Trainer's
    loggers, the scale and the total to the progress bar; a skipped step's reason and parameters,
    which are text, to Lightning's console log.

    Args:
        lost_updates_every: Measure lost updates on every this many applied steps; 0: never. Logged
            is the share of the parameter group that loses most.
        health_every: Compare each layer with its own past on every this many steps; 0: never. The
            first that leaves it is told by a warning (:class:`halfstep.LayerHealth`).
    """

    def __init__(self, *, lost_updates_every: int = 50, health_every: int = 100) -> None:
        self._every, self._health_every = lost_updates_every, health_every
        self._seen: StepResult | None = None
        self._measuring: list[LostUpdateMeter | LayerHealth] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure.

        Raises:
            ConfigError: If the Trainer has another precision plugin.
        """
        plugin = trainer.precision_plugin
        if not isinstance(plugin, HalfstepPrecision):
            raise ConfigError(
                "StepLog reads halfstep's precision plugin, and the Trainer has "
                f"{type(plugin).__name__}; allowed: Trainer(plugins=[HalfstepPrecision(...)])"
            )
        engine = plugin._ready()
        self._seen, self._meter = None, LostUpdateMeter(engine, self._every)
        self._measuring = [self._meter]
        if self._health_every:
            self._measuring.append(LayerHealth(pl_module, engine, every=self._health_every))

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
        reports = self._meter.report() if result.applied and self._meter.fresh else ()
        shares = [report.lost for report in reports if not math.isnan(report.lost)]
        silent |= {"lost_updates": max(shares)} if shares else {}
        for values, bar in ((shown, True), (silent, False)):
            named = {f"halfstep/{key}": float(value) for key, value in values.items()}
            pl_module.log_dict(named, prog_bar=bar, on_step=True, on_epoch=False)
        if not result.applied:
            whose = some(result.nonfinite_parameters) or "not known"
            rank_zero_info(
                f"halfstep: step {trainer.global_step} skipped, {result.reason} in the gradients "
                f"of {whose}; loss scale {result.loss_scale:g} -> {result.next_loss_scale:g}"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop measuring."""
        while self._measuring:
            self._measuring.pop().close()


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
        if name == "_scheduler":  # while being copied
            raise AttributeError(name)
        return getattr(self._scheduler, name)
