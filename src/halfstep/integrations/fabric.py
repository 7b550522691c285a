"""halfstep's precision plugin for Lightning Fabric, and the half that the Trainer's shares with it.

It is given as ``Fabric(plugins=[...])``, not together with ``precision=``.
``docs/integrations-lightning.md`` is the how-to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError, PrecisionError
from halfstep.integrations.optimizer_tensors import owned
from halfstep.precision.casting.autocast import Autocast
from halfstep.precision.casting.cast import (
    cast_at_border,
    cast_floating,
    cast_to_policy_,
    check_wrappers,
    give_back_,
)
from halfstep.precision.checks import one_device
from halfstep.precision.low_bit.linear import Region
from halfstep.precision.policy.devices import default_device
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import OneRank, global_norm
from halfstep.precision.step import Precision

try:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import Precision as FabricPlugin
except ModuleNotFoundError as error:
    raise ConfigError(
        f"halfstep.integrations.fabric needs Lightning, and {error.name} is not installed: "
        "pip install 'halfstep[lightning]'"
    ) from error


class PolicyPlugin:
    """A policy behind the hooks of a Lightning precision plugin.

    Attributes:
        policy: The precision policy.
        engine: The :class:`halfstep.Precision` that takes the steps; None outside a training.
        last_step: What the latest optimizer step did; None before the first.
    """

    _not_set_up = "halfstep's precision plugin has no model yet"

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
        self._context: Autocast | None = None
        self._border: ModuleBorder | None = None
        self._own_weights: list[tuple[nn.Parameter, Tensor]] = []  # of a model under evaluation
        self._max_norms: dict[Optimizer, float] = {}  # to which the next steps clip
        self._state: dict[str, Any] = {}  # of a training that has ended

    def train_(self, model: nn.Module, optimizers: Sequence[Optimizer], wrapped: nn.Module) -> None:
        """Put a model and its optimizers under the policy; ``wrapped`` is the module to call.

        Raises:
            PrecisionError: As :class:`halfstep.Precision`; nothing has been changed then.
        """
        on_spike = self._options["on_spike"]
        if len(optimizers) > 1 and on_spike != "off":
            raise PrecisionError(
                f"on_spike={on_spike!r} with {len(optimizers)} optimizers, each of which "
                "takes steps of its own losses; allowed: one optimizer, or on_spike='off'"
            )
        check_wrappers(self.policy, wrapped)
        self.engine = Precision(self.policy, model, optimizers, **self._options)
        self._take(model, self.engine.autocast())
        self.last_step, self._state, self._max_norms = None, {}, {}

    def evaluate_(self, model: nn.Module) -> None:
        """Put a model under the policy; :meth:`teardown` restores its own weights."""
        context = Autocast(self.policy, model, one_device(model))
        own = [(parameter, parameter.detach()) for parameter in model.parameters()]
        cast_to_policy_(model, self.policy)
        cast_at_border(place(self.policy, model))
        self._own_weights = own
        self._take(model, context)

    def _take(self, model: nn.Module, context: Autocast) -> None:
        self._model, self._context = model, context
        self._border = ModuleBorder(model, self.policy)

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
            for parameter, value in self._own_weights:
                parameter.data = value.to(parameter.device)
        if self._border is not None:
            self._border.remove_()
        self._model = self._context = self._border = None
        self._own_weights = []

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The context for a forward and its loss.

        Raises:
            PrecisionError: If no model was set up.
        """
        if self._context is None or self._border is None:
            raise PrecisionError(self._not_set_up)
        with self._context, self._border.on():
            yield

    def _ready(self) -> Precision:
        if self.engine is None:
            raise PrecisionError(self._not_set_up)
        return self.engine

    def step_(self, optimizer: Optimizer) -> None:
        """Check, clip and apply this optimizer's gradients, or skip; others' gradients wait."""
        engine, max_norm = self._ready(), self._max_norms.pop(optimizer, None)
        if engine._loss is None and isinstance(engine.ranks, OneRank):  # else they agree in it
            raise PrecisionError(
                "step() without backward(): call self.manual_backward(loss), in Fabric "
                "fabric.backward(loss), instead of loss.backward(), so that the loss is scaled and "
                "checked"
            )
        with _others_aside(engine, optimizer):
            self.last_step = engine.step(max_norm=max_norm)

    def clip_value_(self, optimizer: Optimizer, limit: float) -> None:
        """Clip gradients to ``[-limit, limit]``; what is not finite stays, to be found."""
        for parameter in owned(optimizer):
            gradient = parameter.grad
            if gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                values.copy_(torch.where(values.isfinite(), values.clamp(-limit, limit), values))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's and the optimizers' state."""
        return self._state if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken; ignored outside a training."""
        if self.engine is not None:
            self.engine.load_state_dict(state_dict)


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


def check_strategy(strategy: object, policy: object) -> None:
    """Refuse strategies that cast, shard or scale themselves."""
    if type(strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise PrecisionError(
            f"strategy {type(strategy).__name__} shards weights or owns a loss scaler, so policy "
            f"{policy} cannot be honoured there; allowed: a single device, or strategy='ddp'. For "
            "sharded training use halfstep.distributed (docs/distributed.md)"
        )


class ModuleBorder:
    """Casts at the outermost call of any submodule with parameters, while it is on.

    :class:`halfstep.Precision` casts at the border of ``model(...)``. A ``training_step`` calls
    ``self.net(x)`` instead, and computes the loss from its output: there the border is the
    outermost call of a submodule. Floating inputs are cast to the compute dtype if the policy has
    16-bit weights, and floating outputs to fp32. Modules without parameters (losses, metrics) are
    not touched. Calls from within the model's own ``forward`` are not outermost, and neither is
    what activation checkpointing repeats during a backward.
    """

    def __init__(self, model: nn.Module, policy: PrecisionPolicy) -> None:
        self._policy = policy
        self._root = model
        self._on = False
        self._depth = 0
        self._handles: list[Any] = []
        if policy.compute_dtype == torch.float32:
            return
        for module in model.modules():
            if any(p.is_floating_point() for p in module.parameters()):
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    def remove_(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Cast within this context."""
        before = self._on, self._depth
        self._on, self._depth = True, 0
        try:
            yield
        finally:
            self._on, self._depth = before

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._on or self._redirected(module):
            return None
        self._depth += 1
        low = any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters())
        if self._depth > 1 or module is self._root or not low:
            return None
        dtype = self._policy.compute_dtype
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._on or self._depth == 0:  # it was not entered
            return None
        self._depth -= 1
        return cast_floating(output, self._policy.output_dtype) if self._depth == 0 else None

    def _redirected(self, module: nn.Module) -> bool:
        """Whether Lightning calls the model only to reach its ``training_step``, as under DDP."""
        own = module.__dict__.get("forward")
        if module is not self._root or own is None or isinstance(own, Region):
            return False
        return getattr(own, "__func__", own) is not type(module).forward


class HalfstepPrecision(PolicyPlugin, FabricPlugin):
    """A whole halfstep policy inside Fabric.

    Call :meth:`setup` in place of ``fabric.setup``, since Fabric does not tell a precision plugin
    which optimizer will step. The rest of the loop is as usual in Fabric::

        precision = HalfstepPrecision("bf16-master")
        fabric = Fabric(plugins=[precision])
        model, optimizer = precision.setup(fabric, model, optimizer)
        ...
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()  # does not update the weights if precision.last_step.applied is False

    Save it with the model: ``fabric.save(path, {"model": model, "optimizer": optimizer,
    "precision": precision})``.
    """

    _not_set_up = (
        "the model or the optimizer is not under the policy: call "
        "precision.setup(fabric, model, optimizer) where fabric.setup(...) stood"
    )

    def setup(self, fabric: Fabric, model: nn.Module, *optimizers: Optimizer) -> Any:
        """Set up like ``fabric.setup``, and put the model under the policy.

        Args:
            fabric: A Fabric made with this plugin.
            model: A model with fp32 weights; compile it afterwards.
            optimizers: One or several, each stepped separately; none for evaluation.

        Returns:
            Fabric's model and optimizers, in the given order; just the model if it is alone.

        Raises:
            ConfigError: If the Fabric has another plugin, or this is the second call.
            PrecisionError: If policy, model, optimizer and strategy are not compatible.
        """
        check_strategy(fabric.strategy, self.policy)
        if fabric.strategy.precision is not self:
            raise ConfigError(
                "setup() of a precision plugin that this Fabric does not have; make it with "
                "Fabric(plugins=[precision])"
            )
        if self.engine is not None:
            raise ConfigError(
                "setup() was called already; a HalfstepPrecision trains one model. Put models that "
                "train together into one nn.Module"
            )
        ready: Any = fabric.setup(model, *optimizers)
        if not optimizers:
            self.evaluate_(ready.module)
            return ready
        wrapped, *stepping = ready
        self.train_(wrapped.module, [o.optimizer for o in stepping], wrapped._forward_module)
        strategy: Any = fabric.strategy
        strategy.clip_gradients_norm = self._clip_norm
        strategy.clip_gradients_value = self._clip_value
        return ready

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and back-propagate, with the options of ``Precision.backward``."""
        self._ready().backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any) -> None:  # type: ignore[override]
        """Take the step, or skip it; see ``last_step``.

        Raises:
            NonFiniteError: If continuing cannot help; its ``cause`` says why.
            PrecisionError: Without a ``fabric.backward``.
        """
        self.step_(optimizer)

    def _clip_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Return the norm of the gradients, and let the next step clip to ``max_norm``.

        It does not raise for an overflow: the step itself then skips, or stops the run.
        """
        if float(norm_type) != 2.0:
            raise PrecisionError(
                f"clip_gradients(norm_type={norm_type}); allowed: 2, the global 2-norm, or clip_val"
            )
        self._max_norms[optimizer] = float(max_norm)
        return global_norm([p.grad for p in owned(optimizer) if p.grad is not None])

    def _clip_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.clip_value_(optimizer, float(clip_val))
