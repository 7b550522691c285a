"""Who owns the weights that the optimizer updates.

With 16-bit weights an update smaller than half the gap between neighbouring numbers rounds to
nothing: at 1.0 the bf16 gap is 2^-7, so 100 updates of 1e-3 leave 1.0. Either an fp32 copy, the
master weights, takes the updates, and the 16-bit weights are rounded from it after every step; or
one of halfstep's optimizers keeps beside the weight what it cannot hold.

Gradients move out of the 16-bit parameter as soon as autograd has finished each of them, so
micro-batches add up in fp32.

**Source:** Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.precision.cast import cast_parameters_
from halfstep.precision.optimizer_masters import (
    Gradients,
    KeepsMasters,
    OptimizerMasters,
    step_optimizers,
)
from halfstep.precision.policy import PrecisionPolicy
from halfstep.precision.rules import parameter_dtypes


class MasterWeights(Protocol):
    """The optimizer's view of the weights; :class:`NoMasters` is the null object."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable tensors that the optimizer updates, under the model's names."""

    def covers(self, parameter: nn.Parameter) -> bool:
        """Whether an update of ``parameter`` by the optimizer reaches the model in full."""

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The finished gradients of those that have one."""

    def clear(self) -> None:
        """Forget all gradients."""

    def update_(self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
        """Let the optimizers step with the gradients times ``factor``, down to the weights."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and what the weight stands for, exact, one after the other."""

    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Set every weight from :meth:`items`, of this policy or of another."""


class NoMasters:
    """The model's parameters are the masters."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's own trainable parameters."""
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    def covers(self, parameter: nn.Parameter) -> bool:
        """Always."""
        return True

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Each parameter's own ``grad``."""
        return {p: p.grad for p in parameters if p.grad is not None}

    def clear(self) -> None:
        """Set every ``grad`` to None."""
        _clear(self._optimizers)

    def update_(self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
        """Step; only halfstep's optimizers need not change the gradients for it."""
        step_optimizers(optimizers, gradients, factor)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The weights."""
        return ((name, p.detach()) for name, p in self.named_parameters().items())

    @torch.no_grad()
    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Copy the values into the weights."""
        for name, parameter in self.named_parameters().items():
            parameter.copy_(values[name])


class Fp32Masters:
    """An fp32 copy of every trainable parameter, and 16-bit weights in the model."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        param_dtype: torch.dtype | Mapping[str, torch.dtype],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Take fp32 copies, cast the model in place, and give the optimizers the copies.

        Args:
            model: Its Parameter objects stay the same objects; only their storage changes. Masters
                start from the values before the cast.
            param_dtype: torch.bfloat16 or torch.float16, or one for each parameter by name; an fp32
                one is its own master.
            optimizers: Their groups' parameters are replaced.
        """
        self._masters: dict[str, nn.Parameter] = {}
        self._weights: list[Tensor] = []
        self._copies: list[nn.Parameter] = []
        self._optimizers = optimizers
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.is_floating_point():
                continue
            if not isinstance(param_dtype, torch.dtype) and param_dtype[name] == torch.float32:
                self._masters[name] = parameter
                continue
            self._masters[name] = nn.Parameter(parameter.detach().float().clone())
            self._weights.append(parameter)
            self._copies.append(self._masters[name])
        self._known = set(self._masters.values())
        cast_parameters_(model, param_dtype)
        replacements = dict(zip(self._weights, self._copies, strict=True))
        for weight, master in replacements.items():
            weight.grad = None
            weight.register_post_accumulate_grad_hook(_ToMaster(master))  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [replacements.get(p, p) for p in group["params"]]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The fp32 masters under their weights' names."""
        return dict(self._masters)

    def covers(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of the masters."""
        return parameter in self._known

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The masters' ``grad``, in fp32."""
        return {p: p.grad for p in parameters if p.grad is not None}

    def clear(self) -> None:
        """Set every master's ``grad`` to None."""
        _clear(self._optimizers)

    def update_(self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
        """Step, then round every master to nearest into its 16-bit weight."""
        step_optimizers(optimizers, gradients, factor)
        self._push_()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The masters."""
        return ((name, master.detach()) for name, master in self._masters.items())

    @torch.no_grad()
    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Copy the values into the masters and round them into the weights."""
        for name, master in self._masters.items():
            master.copy_(values[name])
        self._push_()

    @torch.no_grad()
    def _push_(self) -> None:
        if self._weights:
            torch._foreach_copy_(self._weights, [*self._copies])


class _ToMaster:
    """Add a finished 16-bit gradient to the master's fp32 gradient and free it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is None:
            return
        if self._master.grad is None:
            self._master.grad = gradient.float()
        else:
            self._master.grad.add_(gradient)
        weight.grad = None


def _clear(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def make_masters(
    policy: PrecisionPolicy, model: nn.Module, optimizers: Sequence[Optimizer]
) -> MasterWeights:
    """Cast the model to the policy's weights and give the optimizers what they shall update.

    Args:
        policy: Says whether there are masters, and the format of the weights.
        model: Its floating parameters are cast in place to ``param_dtype``.
        optimizers: With ``*-master`` their groups get the masters in the weights' places.

    Raises:
        PrecisionError: If an optimizer was made for other formats than the policy's; nothing is
            changed then.
    """
    own: list[Any] = [o for o in optimizers if isinstance(o, KeepsMasters)]
    for optimizer in own:
        optimizer.check_precision(policy.update, policy.moment_format)
    for optimizer in own:
        optimizer.set_precision(policy.update, policy.moment_format)
    if policy.has_masters:
        return Fp32Masters(model, parameter_dtypes(policy, model), optimizers)
    if policy.update != "nearest":
        return OptimizerMasters(model, policy, optimizers)
    if policy.is_pure:
        cast_parameters_(model, parameter_dtypes(policy, model))
    return NoMasters(model, optimizers)
