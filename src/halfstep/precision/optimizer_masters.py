"""Masters that an optimizer keeps beside 16-bit weights, and steps that need no second pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.cast import cast_parameters_
from halfstep.precision.gradients import global_norm, multiply_
from halfstep.precision.local import local_gradient
from halfstep.precision.policy import PrecisionPolicy
from halfstep.precision.rules import parameter_dtypes

Gradients = Mapping[nn.Parameter, Tensor]
Parts = Mapping[str, nn.Parameter]
"""What this rank holds of sharded parameters: :func:`halfstep.precision.local.local_parameters`."""


@runtime_checkable
class KeepsMasters(Protocol):
    """An optimizer that keeps what a 16-bit weight cannot hold: those of ``halfstep.optim``."""

    def check_precision(self, update: Any, moments: Any) -> None:
        """Refuse ways of keeping weights and moments that contradict its own."""

    def set_precision(self, update: Any, moments: Any) -> None:
        """Take the ways of keeping weights and moments."""

    def check_step(self, gradients: Gradients) -> None:
        """Refuse gradients that a step cannot take, before any optimizer steps."""

    def step(
        self, closure: None = None, *, gradients: Gradients | None = None, multiplier: float = 1.0
    ) -> Any:
        """Take a step with these gradients times a number."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """As :func:`halfstep.precision.gradients.global_norm`."""

    def read_master(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 numbers that a parameter stands for."""

    def write_master_(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set them."""


class OptimizerMasters:
    """16-bit weights; one of halfstep's optimizers keeps what they cannot hold."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        policy: PrecisionPolicy,
        optimizers: Sequence[Optimizer],
        parts: Parts,
    ) -> None:
        """Cast the model's floating parameters and give the optimizers their exact values.

        Args:
            model: Its Parameter objects stay the same objects; only their storage changes.
            policy: One with ``needs_own_optimizer``.
            optimizers: All of ``halfstep.optim``.
            parts: Of sharded parameters, which have the dtype already.
        """
        self._owner: dict[nn.Parameter, KeepsMasters] = {}
        for optimizer in optimizers:
            assert isinstance(optimizer, KeepsMasters), "checked before anything is changed"
            for group in optimizer.param_groups:
                self._owner |= dict.fromkeys(group["params"], optimizer)
        weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        named = ((n, parts.get(n, p)) for n, p in weights.items())
        self._named = {n: p for n, p in named if p in self._owner}
        exact = {name: p.detach().float() for name, p in self._named.items()}
        cast_parameters_(model, parameter_dtypes(policy, model))
        self._buffers = {p: _Buffer() for p in self._named.values()}
        for name, parameter in self._named.items():
            weights[name].grad = parameter.grad = None
            weights[name].register_post_accumulate_grad_hook(self._buffers[parameter])  # type: ignore[no-untyped-call]
        self.load_(exact)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's own trainable parameters."""
        return dict(self._named)

    def covers(self, parameter: nn.Parameter) -> bool:
        """Whether it was trainable and the optimizer's when this was made."""
        return parameter in self._buffers

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """16 bit after one micro-batch, which loses nothing; fp32 after several."""
        held = {p: self._buffers[p].gradient for p in parameters if p in self._buffers}
        return {p: gradient for p, gradient in held.items() if gradient is not None}

    def replace(self, gradients: Gradients) -> None:
        """Set the buffers, in the dtype they come in."""
        for parameter, gradient in gradients.items():
            self._buffers[parameter].gradient = gradient

    def clear(self) -> None:
        """Drop every buffer."""
        for parameter, buffer in self._buffers.items():
            parameter.grad = None
            buffer.gradient = None

    def update_(self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
        """Step: unscaling, clipping, update and rounding in one pass over memory."""
        step_optimizers(optimizers, gradients, factor)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """What weight and remainder stand for, in fp32."""
        return ((name, self._owner[p].read_master(p)) for name, p in self._named.items())

    @torch.no_grad()
    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Store the values; what a weight cannot hold goes where its optimizer keeps it."""
        for name, parameter in self._named.items():
            self._owner[parameter].write_master_(parameter, values[name])


class _Buffer:
    """A finished gradient as it came, and fp32 as soon as a second one is added."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def __call__(self, weight: Tensor) -> None:
        gradient, weight.grad = local_gradient(weight), None
        if self.gradient is None or gradient is None:
            self.gradient = gradient if self.gradient is None else self.gradient
        else:
            self.gradient = self.gradient.float().add_(gradient)


def common_norm(optimizers: Sequence[Optimizer], gradients: Sequence[Tensor]) -> Tensor:
    """The gradients' 2-norm as fp32 scalar on their device, by halfstep's kernel if one is there.

    See :func:`halfstep.precision.gradients.global_norm`.
    """
    if not any(gradient.is_sparse for gradient in gradients):
        for optimizer in optimizers:
            if isinstance(optimizer, KeepsMasters):
                return optimizer.norm(gradients)
    return global_norm(gradients)


def step_optimizers(optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
    """Step with the gradients times a number; only halfstep's optimizers leave them unchanged."""
    own: list[Any] = [o for o in optimizers if isinstance(o, KeepsMasters)]
    for optimizer in own if len(optimizers) > 1 else ():  # a single one checks for itself
        optimizer.check_step(gradients)
    if len(own) < len(optimizers):
        others = [o for o in optimizers if not isinstance(o, KeepsMasters)]
        theirs = {p for o in others for group in o.param_groups for p in group["params"]}
        multiply_([gradient for p, gradient in gradients.items() if p in theirs], factor)
    for optimizer in optimizers:
        if isinstance(optimizer, KeepsMasters):
            optimizer.step(gradients=gradients, multiplier=factor)
        else:
            optimizer.step()


def require_own_optimizer(policy: PrecisionPolicy, optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that cannot keep weights or moments as the policy says.

    Raises:
        PrecisionError: Naming the optimizer, the policy and the nearest that works.
    """
    if not policy.needs_own_optimizer:
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, KeepsMasters):
            nearest = "bf16-master" if policy.update != "nearest" else f"{policy}".split(",")[0]
            raise PrecisionError(
                f"policy {policy} needs an optimizer that keeps update={policy.update} and "
                f"moments={policy.moment_format}: halfstep.optim's AdamW, SGD or Lion; "
                f"{type(optimizer).__name__} does not. The nearest policy for it is {nearest}"
            )
