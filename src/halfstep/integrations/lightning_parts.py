"""What the plugins for Lightning's Trainer and for Fabric have in common; needs no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from halfstep.errors import PrecisionError
from halfstep.integrations.module_border import ModuleBorder
from halfstep.precision.cast import (
    CastInputs,
    around_model,
    cast_at_border,
    cast_to_policy_,
    remove_regions_,
)
from halfstep.precision.checks import one_device
from halfstep.precision.gradients import find_nonfinite, multiply_
from halfstep.precision.parse import parse_policy
from halfstep.precision.policy import PrecisionPolicy
from halfstep.precision.result import StepResult
from halfstep.precision.step import Precision
from halfstep.precision.wrappers import check_wrappers


class PolicyPlugin:
    """A whole policy behind the hooks of a Lightning precision plugin.

    Attributes:
        policy: What was asked for.
        engine: The :class:`halfstep.Precision` that takes the steps; None until a model and its
            optimizer are known.
        last_step: What the latest optimizer step did; None before the first.
        attempts: Optimizer steps so far, skipped ones included.
    """

    def __init__(
        self,
        policy: str | PrecisionPolicy,
        *,
        on_nonfinite: str = "stop",
        upcast_trainable: bool = False,
    ) -> None:
        """Read the policy; ``on_nonfinite`` and ``upcast_trainable`` as :class:`Precision` has.

        Raises:
            PrecisionError: If no model in Lightning can honour it.
        """
        self.policy = parse_policy(policy)
        if self.policy.casts == "module":
            raise PrecisionError(
                f"policy {self.policy} casts where FSDP2 gathers weights, and halfstep's Lightning "
                "plugins shard nothing; use bf16-mixed, or halfstep.distributed (parallel=shard=N)"
            )
        self.precision: Any = lightning_word(self.policy)
        self._options: dict[str, Any] = {
            "on_nonfinite": on_nonfinite,
            "upcast_trainable": upcast_trainable,
        }
        self.engine: Precision | None = None
        self.last_step: StepResult | None = None
        self.attempts = 0
        self._model: nn.Module | None = None
        self._border: ModuleBorder | None = None
        self._undo: Callable[[], None] | None = None
        self._backwards = 0
        self._forwards = 0
        self._max_norm: float | None = None
        self._viewing = False
        self._applied = True

    def train_(self, model: nn.Module, optimizer: Optimizer, wrapped: nn.Module) -> None:
        """Put a model and its optimizer under the policy; ``wrapped`` is what calls the model.

        Raises:
            PrecisionError: As :class:`Precision`; nothing has been changed then.
        """
        if isinstance(optimizer, LBFGS):
            raise PrecisionError(
                "LBFGS calls the loss several times within a step, so that no step can be skipped "
                "as a whole; use halfstep.optim's, or any optimizer that takes one gradient a step"
            )
        self.give_back_()
        check_wrappers(self.policy, wrapped)
        self.engine = Precision(self.policy, model, optimizer, **self._options)
        self.last_step, self._applied, self._max_norm = None, True, None
        self._backwards = self._forwards = 0
        self._take(model)

    def evaluate_(self, model: nn.Module) -> None:
        """Run a model in the policy without training it; :meth:`give_back_` restores its weights.

        A model that was trained under a policy is left as it is.
        """
        trained = any(isinstance(h, CastInputs) for h in model._forward_pre_hooks.values())
        if not trained and self._model is not model:
            self.give_back_()
            self.engine = None
            kept = {p: p.detach() for p in model.parameters()}
            cast_to_policy_(model, self.policy)
            handles = cast_at_border(model, self.policy)

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
            raise self._not_set_up()
        self._forwards += 1
        with around_model(self.policy, self._model, one_device(self._model)), self._border.on():
            yield

    def _not_set_up(self) -> PrecisionError:
        return PrecisionError("halfstep's precision plugin has no model yet")

    def _ready(self, optimizer: Optimizer | None = None) -> Precision:
        """The engine, which must be there, and be that of this optimizer."""
        if self.engine is None or (
            optimizer is not None and optimizer is not self.engine.optimizers[0]
        ):
            raise self._not_set_up()
        return self.engine

    def backward_(self, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scale the loss and back-propagate.

        Raises:
            PrecisionError: For options of ``backward``, or if no forward ran in the policy.
        """
        engine = self._ready()
        if args or kwargs:
            named = ", ".join([*map(repr, args), *kwargs])
            raise PrecisionError(
                f"backward(loss, {named}): allowed is backward(loss) alone; add up several losses "
                "of one graph before it"
            )
        if not self._forwards:
            raise PrecisionError(
                f"backward() of a loss whose forward did not run in policy {self.policy}: call the "
                "model that setup() returned, or its other methods under fabric.autocast()"
            )
        engine.backward(loss)
        self._backwards += 1

    def step_(self, optimizer: Optimizer) -> None:
        """Check, clip and apply the gradients, or skip the step."""
        max_norm, self._max_norm = self._max_norm, None
        self._backwards = self._forwards = 0
        self.attempts += 1
        self._applied = False
        self.last_step = self._ready(optimizer).step(max_norm=max_norm)
        self._applied = self.last_step.applied

    def applied(self) -> bool:
        """Whether the latest optimizer step updated the weights; True before the first."""
        return self._applied

    def clip_norm(self, max_norm: float) -> None:
        """Clip the next step's unscaled gradients to a global 2-norm."""
        present = self._max_norm
        self._max_norm = max_norm if present is None else min(present, max_norm)

    def clip_value_(self, optimizer: Optimizer, limit: float) -> None:
        """Clip each unscaled gradient to ``[-limit, limit]``; an overflow stays one."""
        with self.unscaled(optimizer) as gradients:
            for gradient in gradients:
                gradient.clamp_(-limit, limit)

    @contextmanager
    def unscaled(self, optimizer: Optimizer) -> Iterator[list[Tensor]]:
        """The step's gradients without their loss scale, to be read and changed in place.

        The scale is a power of two, so both ways are exact down to 2^-126. 16-bit gradients are
        fp32 meanwhile, as fp16 without the scale would be 0 below 2^-25; so a hook changes them in
        place, or puts one of the parameter's own dtype in their stead. A gradient that is not
        finite stays so whatever is done to it, so that no clipping hides an overflow.
        """
        engine = self._ready(optimizer)
        if self._viewing:
            yield _gradients(engine)
            return
        before = _gradients(engine)
        found = find_nonfinite((str(i), gradient) for i, gradient in enumerate(before))
        scale = engine.loss_scale.value
        narrow = [g for g in before if g.dtype != torch.float32 and scale != 1]
        places = [gradient.data for gradient in narrow]
        for gradient in narrow:
            gradient.data = gradient.data.float()
        multiply_(before, 1 / scale)
        self._viewing = True
        try:
            yield before
        finally:
            self._viewing = False
            after = _gradients(engine)
            given = [g for g in after if g.dtype != torch.float32 and scale != 1]
            multiply_([g for g in after if g.dtype == torch.float32], scale)
            for gradient in given:  # by a hook; a scale such as 65536 is no fp16 number
                gradient.copy_(gradient.float() * scale)
            for gradient, place in zip(narrow, places, strict=True):
                gradient.data = place.copy_(gradient.data)  # what was not changed, bit for bit
            if len(after) == len(before):
                for names, value in ((found.inf, float("inf")), (found.nan, float("nan"))):
                    for name in names:
                        gradient = after[int(name)]
                        stored = gradient._values() if gradient.is_sparse else gradient
                        stored.fill_(value)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the model's and the optimizer's state."""
        return {} if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken; of no use without an optimizer."""
        if self.engine is not None:
            self.engine.load_state_dict(state_dict)


def _gradients(engine: Precision) -> list[Tensor]:
    owned = [p for o in engine.optimizers for group in o.param_groups for p in group["params"]]
    return list(engine.masters.gradients(owned).values())


def lightning_word(policy: PrecisionPolicy) -> str:
    """Lightning's nearest word for a policy, for its summaries and logs; it decides nothing."""
    if policy.compute_dtype == torch.float32:
        return "32-true"
    form = "bf16" if policy.compute_dtype == torch.bfloat16 else "16"
    return f"{form}-mixed" if policy.param_dtype == torch.float32 else f"{form}-true"


def check_strategy(strategy: object, policy: object) -> None:
    """Refuse strategies that cast, shard or scale by themselves.

    Raises:
        PrecisionError: Naming the strategy.
    """
    if type(strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise PrecisionError(
            f"strategy {type(strategy).__name__} shards weights or owns a loss scaler, so policy "
            f"{policy} cannot be honoured there; allowed: a single device, or strategy='ddp'. For "
            "sharded training use halfstep.distributed (docs/distributed.md)"
        )
