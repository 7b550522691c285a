"""The code shared by the plugins for Lightning's Trainer and Fabric; it imports no Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.integrations.grad_scaler import GradScaler
from halfstep.integrations.loop_scaler import loss_error
from halfstep.integrations.optimizer_tensors import owned
from halfstep.precision.agreement import ranks_of_this_process
from halfstep.precision.casting.cast import (
    CastInputs,
    around_model,
    cast_at_border,
    cast_floating,
    cast_to_policy_,
    check_wrappers,
    remove_regions_,
)
from halfstep.precision.casting.region import Region
from halfstep.precision.checks import one_device
from halfstep.precision.policy.devices import default_device
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import AUTO, Auto, parse_later, parse_policy
from halfstep.precision.recovery import parse_choices
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import OneRank, find_nonfinite
from halfstep.precision.step import Precision


class PolicyPlugin:
    """A whole policy behind the hooks of a Lightning precision plugin.

    Attributes:
        policy: The precision policy.
        engine: The :class:`halfstep.Precision` that takes the steps; None until a model and its
            optimizer are known.
        last_step: What the latest optimizer step did; None before the first.
        attempts: Optimizer steps so far, skipped ones included.
    """

    _not_set_up = "halfstep's precision plugin has no model yet"

    def __init__(
        self,
        policy: str | PrecisionPolicy,
        *,
        on_nonfinite: str = "stop",
        on_spike: str = "off",
        upcast_trainable: bool = False,
    ) -> None:
        """Parse the policy; the other options are those of :class:`Precision`.

        Raises:
            PrecisionError: If the policy cannot be honoured in Lightning.
        """
        # Lightning asks for the precision before it says which device it takes.
        self._expected = default_device().type if isinstance(parse_later(policy), Auto) else ""
        self.policy = parse_policy(policy, self._expected or None)
        if self.policy.casts == "module":
            raise PrecisionError(
                f"policy {self.policy} casts where FSDP2 gathers weights, and halfstep's Lightning "
                "plugins shard nothing; use bf16-mixed, or halfstep.distributed (parallel=shard=N)"
            )
        self.precision: Any = lightning_word(self.policy)
        choices = parse_choices(on_nonfinite, on_spike)
        self._options: Any = {
            "on_nonfinite": choices[0],
            "on_spike": choices[1],
            "upcast_trainable": upcast_trainable,
        }
        self.engine: Precision | None = None
        self.last_step: StepResult | None = None
        self.attempts = 0
        self._model: nn.Module | None = None
        self._border: ModuleBorder | None = None
        self._undo: Callable[[], None] | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._shared: SharedSteps | None = None
        self._said = False
        self._backwards = 0
        self._forwards = self._inside = 0
        self._max_norm: float | None = None
        self._viewing: list[Optimizer] = []  # optimizers inside :meth:`unscaled`
        self._applied = True

    def train_(self, model: nn.Module, optimizers: Sequence[Optimizer], wrapped: nn.Module) -> None:
        """Put a model and its optimizers under the policy; ``wrapped`` is the module to call.

        Raises:
            PrecisionError: As :class:`Precision`; nothing has been changed then.
        """
        if len(optimizers) > 1 and self._options["on_spike"].action != "off":
            raise PrecisionError(
                f"on_spike={self._options['on_spike']} with {len(optimizers)} optimizers, each of "
                "which takes steps of its own losses; allowed: one optimizer, or on_spike='off'"
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise PrecisionError(
                "LBFGS calls the loss several times within a step, so that no step can be skipped "
                "as a whole; use halfstep.optim's, or any optimizer that takes one gradient a "
                "step. Lightning's Trainer runs LBFGS under fp32 and bf16-mixed, by itself"
            )
        self.give_back_()
        device = _device(model).type
        if self._expected not in ("", device):
            raise PrecisionError(
                f"precision auto took {self.policy} for {self._expected}, and the model is on "
                f"{device}; write the policy, such as {parse_policy(AUTO, device)!s}"
            )
        check_wrappers(self.policy, wrapped)
        self._shared = None
        if self.policy.param_dtype == torch.float32:
            every = owned(*optimizers)
            self._shared = SharedSteps(optimizers) if len({*every}) < len(every) else None
            if self.engine is not None:
                self.engine.close()  # fp32 weights are complete, so another fit can use them
        self.engine = Precision(self.policy, model, self._shared or optimizers, **self._options)
        self._optimizers = optimizers
        self.last_step, self._applied, self._max_norm = None, True, None
        self._backwards = self._forwards = 0
        self._take(model)

    def evaluate_(self, model: nn.Module) -> None:
        """Put a model under the policy for evaluation; :meth:`give_back_` restores its weights.

        A model that was trained under a policy is left as it is.
        """
        trained = any(isinstance(h, CastInputs) for h in model._forward_pre_hooks.values())
        if not trained and self._model is not model:
            self.give_back_()
            self.engine = None
            kept = {p: p.detach() for p in model.parameters()}
            cast_to_policy_(model, self.policy)
            handles = cast_at_border(place(self.policy, model))

            def undo() -> None:
                for parameter, value in kept.items():
                    parameter.data = value
                for handle in handles:
                    handle.remove()
                remove_regions_(model)

            self._undo = undo
        self._take(model)

    def give_back_(self) -> None:
        """Undo :meth:`evaluate_`; a trained model and its masters stay, for a checkpoint."""
        if self._undo is not None:
            self._undo()
            self._undo = self._model = None

    def _take(self, model: nn.Module) -> None:
        if self._border is not None:
            self._border.remove_()
        self._border = ModuleBorder(model, self.policy)
        self._model = model

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The context for a forward and its loss.

        Raises:
            PrecisionError: If no model was set up.
        """
        if self._model is None or self._border is None:
            raise PrecisionError(self._not_set_up)
        self._forwards += 1
        self._inside += 1
        try:
            with around_model(self.policy, self._model, _device(self._model)), self._border.on():
                yield
        finally:
            self._inside -= 1

    def _ready(self, optimizer: Optimizer | None = None) -> Precision:
        """The engine; an error if there is none, or if the optimizer is not one of its own."""
        if self.engine is None or (
            optimizer is not None and all(optimizer is not o for o in self._optimizers)
        ):
            raise PrecisionError(self._not_set_up)
        return self.engine

    def backward_(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and back-propagate; with the options of ``torch.Tensor.backward``.

        Raises:
            PrecisionError: For a ``gradient`` of the loss, or if no forward ran in the policy.
        """
        engine = self._ready()
        named = zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)
        options = dict(named) | kwargs
        if options.pop("gradient", None) is not None:
            raise PrecisionError(
                "backward(loss, gradient=...): the loss scale is the gradient of the loss; "
                "multiply the loss instead"
            )
        if not self._forwards and not self._inside:
            raise PrecisionError(
                f"backward() of a loss whose forward did not run in policy {self.policy}: call the "
                "model that setup() returned, or its other methods under fabric.autocast()"
            )
        engine.backward(loss, **options)
        self._backwards += 1

    def has_backward(self) -> bool:
        """Whether there was a backward since the last step.

        Raises:
            PrecisionError: If gradients were made without :meth:`backward_`, and so not scaled.
        """
        if self._backwards:
            return True
        if _held(self._optimizers):
            raise _no_backward()
        return False

    def step_(self, optimizer: Optimizer) -> None:
        """Check, clip and apply this optimizer's gradients, or skip; others' gradients stay."""
        max_norm, self._max_norm = self._max_norm, None
        self._applied = False
        engine = self._ready(optimizer)
        if isinstance(ranks_of_this_process(engine.device), OneRank):  # else they agree in it
            if not self._backwards:
                raise _no_backward()
            if self._nothing_to_do(engine, optimizer):
                return
        self.attempts += 1
        if self._shared is not None:
            self._shared.active = optimizer
        with _waiting(engine, optimizer, self._optimizers) as others:
            self._backwards = self._forwards = min(1, len(others))  # they were backward's, too
            self.last_step = engine.step(max_norm=max_norm)
        self._applied = self.last_step.applied

    def _nothing_to_do(self, engine: Precision, optimizer: Optimizer) -> bool:
        """Whether this optimizer got no gradient, so that, as in torch, its step does nothing."""
        if _held([optimizer]):
            return False
        if not self._said:
            self._said = True
            warnings.warn(
                f"a step of {type(optimizer).__name__} changed nothing: none of its parameters has "
                "a gradient. Said once",
                stacklevel=4,
            )
        if not _held(self._optimizers):
            self._backwards, engine._loss = 0, None
        return True

    def applied(self) -> bool:
        """Whether the latest optimizer step updated the weights; True before the first."""
        return self._applied

    def clip_norm(self, max_norm: float) -> None:
        """Clip the next step's unscaled gradients to a global 2-norm."""
        present = self._max_norm
        self._max_norm = max_norm if present is None else min(present, max_norm)

    def clip_value_(self, optimizer: Optimizer, limit: float) -> None:
        """Clip each unscaled gradient to ``[-limit, limit]``; infinities and NaN stay."""
        with self.unscaled(optimizer) as gradients:
            for gradient in gradients:
                gradient.clamp_(-limit, limit)

    @contextmanager
    def unscaled(self, optimizer: Optimizer) -> Iterator[list[Tensor]]:
        """The step's gradients, to be read and changed in place, or replaced.

        A gradient that is not finite stays so whatever is done to it, so that no clipping hides an
        overflow.
        """
        self._ready(optimizer)
        before = list(_held([optimizer]).values())
        if optimizer in self._viewing:
            yield before
            return
        found = find_nonfinite((str(i), gradient) for i, gradient in enumerate(before))
        self._viewing.append(optimizer)
        try:
            yield before
        finally:
            self._viewing.remove(optimizer)
            after = list(_held([optimizer]).values())
            if len(after) == len(before):
                for names, value in ((found.inf, float("inf")), (found.nan, float("nan"))):
                    for name in names:
                        gradient = after[int(name)]
                        stored = gradient._values() if gradient.is_sparse else gradient
                        stored.fill_(value)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's and the optimizers' state."""
        return {} if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken; ignored without an optimizer."""
        if self.engine is not None:
            self.engine.load_state_dict(state_dict)


class SharedSteps(Optimizer):
    """Optimizers that share parameters, presented to :class:`Precision` as one.

    Its step is a step of the active one. It is for fp32 weights only: a 16-bit weight can have only
    one optimizer that updates its master or remainder.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([*dict.fromkeys(owned(*optimizers))], {})
        self.active = optimizers[0]

    def step(self, closure: Any = None) -> Any:
        """Step the active optimizer, and none of the others."""
        return self.active.step()


def _no_backward() -> PrecisionError:
    return PrecisionError(
        "step() without backward(): call self.manual_backward(loss), in Fabric "
        "fabric.backward(loss), instead of loss.backward(), so that the loss is scaled and checked"
    )


def _device(model: nn.Module) -> torch.device:
    """The device of the model's parameters; the CPU for a model without any."""
    return one_device(model) if any(True for _ in model.parameters()) else torch.device("cpu")


def _held(optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, Tensor]:
    """The gradients of these optimizers' parameters, by parameter."""
    return {p: p.grad for p in owned(*optimizers) if p.grad is not None}


@contextmanager
def _waiting(
    engine: Precision, optimizer: Optimizer, every: Sequence[Optimizer]
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Set the other optimizers' gradients, and the loss, aside during one optimizer's step.

    Gradients of shared parameters are restored after it, as in torch, until the user clears them.
    """
    mine, loss = _held([optimizer]), engine._loss
    others = _held([o for o in every if o is not optimizer])
    others = {p: gradient.clone() if p in mine else gradient for p, gradient in others.items()}
    if not others:
        yield others
        return
    for parameter in others:
        if parameter not in mine:
            parameter.grad = None
    try:
        yield others
    finally:
        for parameter, gradient in others.items():
            parameter.grad = gradient
        engine._loss = loss


def loss_with_backward(loss: Tensor, backward: Callable[..., None]) -> Tensor:
    """The loss as a tensor whose ``backward`` calls another function with it and the options.

    Tensors computed from it have that ``backward`` as well, so that a module's own ``backward``
    hook may compute with the loss before it calls ``loss.backward()``.
    """

    class Loss(Tensor):
        def backward(self, *args: Any, **kwargs: Any) -> None:
            """Call the function that stands in for ``Tensor.backward``, with the same options."""
            backward(self.as_subclass(Tensor), *args, **kwargs)

    return loss.as_subclass(Loss)


def lightning_word(policy: PrecisionPolicy) -> str:
    """Lightning's nearest precision name for a policy, used only in its summaries and logs."""
    if policy.compute_dtype == torch.float32:
        return "32-true"
    form = "bf16" if policy.compute_dtype == torch.bfloat16 else "16"
    return f"{form}-mixed" if policy.param_dtype == torch.float32 else f"{form}-true"


def check_strategy(strategy: object, policy: object) -> None:
    """Refuse strategies that cast, shard or scale themselves; the error names the strategy."""
    if type(strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise PrecisionError(
            f"strategy {type(strategy).__name__} shards weights or owns a loss scaler, so policy "
            f"{policy} cannot be honoured there; allowed: a single device, or strategy='ddp'. For "
            "sharded training use halfstep.distributed (docs/distributed.md)"
        )


# Where a policy's casts happen in a model whose submodules are called from outside.
#
# :class:`halfstep.Precision` casts at the boundary of ``model(...)``. A LightningModule's
# ``training_step`` calls ``self.net(x)`` instead and computes the loss from its output, so there
# the boundary is the outermost call of a submodule.


class ModuleBorder:
    """Casts at the outermost call of any submodule with parameters, while it is on.

    Floating inputs are cast to the compute dtype if the policy has 16-bit weights, and floating
    outputs to fp32, so that the loss is computed in fp32. Modules without parameters
    (losses, metrics, activations) are not touched. Calls from within the model's own ``forward``
    are not outermost, and neither is what activation checkpointing repeats during a backward.
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
        if self._depth > 1 or module is self._root or not _is_low(module):
            return None
        dtype = self._policy.compute_dtype
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._on or self._depth == 0:  # it was not entered
            return None
        self._depth -= 1
        return cast_floating(output, self._policy.output_dtype) if self._depth == 0 else None

    def _redirected(self, module: nn.Module) -> bool:
        """Whether a strategy calls the model only to reach its ``training_step`` (DDP)."""
        own = module.__dict__.get("forward")
        if module is not self._root or own is None or isinstance(own, Region):
            return False
        return getattr(own, "__func__", own) is not type(module).forward


def _is_low(module: nn.Module) -> bool:
    return any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters())


# A loss scaler in a Lightning plugin; a loss that is not finite stops the run with its cause.


class ScaledSteps:
    """The base of both plugins for Lightning's ``16-mixed`` with :class:`halfstep.GradScaler`."""

    scaler: Any

    def __init__(
        self,
        scaler: GradScaler | None = None,
        *,
        device: str | None = None,
        on_spike: str = "off",
    ) -> None:
        """Take the scaler that was given, or one with ``strict=True``.

        Raises:
            ConfigError: If it is not halfstep's, or is for another device.
            PrecisionError: For ``on_spike``, which needs the norm of the gradients.
        """
        if on_spike != "off":
            raise PrecisionError(
                f"ScaledPrecision(on_spike={on_spike!r}): a scaler measures no gradient norm, by "
                "which spikes are found; allowed: HalfstepPrecision('fp16-mixed', on_spike=...)"
            )
        if scaler is None:
            scaler = GradScaler("cuda" if device is None else device, strict=True)
        elif not isinstance(scaler, GradScaler):
            raise ConfigError(
                f"scaler is a {type(scaler).__name__}; allowed: halfstep.GradScaler. For torch's "
                "own use Lightning's MixedPrecision"
            )
        elif device not in (None, scaler._device):
            raise ConfigError(
                f"the scaler was made for {scaler._device!r} and the plugin for {device!r}; give "
                f"GradScaler({device!r}, ...), or leave device out"
            )
        super().__init__("16-mixed", scaler._device, scaler)  # type: ignore[call-arg]
        self.attempts = 0
        self._loss: Tensor | None = None

    @property
    def last_step(self) -> StepResult | None:
        """What the latest optimizer step did; reading it may wait for the device."""
        result: StepResult | None = self.scaler.last_step
        return result

    def _add_loss(self, loss: Tensor) -> None:
        value = loss.detach().float()
        self._loss = value if self._loss is None else self._loss + value

    def _refuse_lbfgs(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS):
            raise PrecisionError("LBFGS and loss scaling are not compatible; use another optimizer")

    def _scaled_step(self, optimizer: Optimizer, options: dict[str, Any]) -> Any:
        """Step and adapt the scale; a non-finite loss raises instead of the errors it causes."""
        value = self.scaler.step(optimizer, **options)
        self.attempts += 1
        loss, self._loss = self._loss, None
        result = self.last_step
        skipped = result is not None and not result.applied
        ranks = ranks_of_this_process(torch.device(self.scaler._device))
        # All ranks call this together, since a skip on one rank is a skip on all.
        broken = loss_error(loss, ranks) if skipped else ""
        try:
            self.scaler.update()
        except NonFiniteError:
            if not broken:
                raise
        if broken:
            raise NonFiniteError(
                f"the loss is {broken} before any gradient: the forward pass or the data made it, "
                "no loss scale can help; the weights are unchanged",
                cause="forward",
            )
        return value
