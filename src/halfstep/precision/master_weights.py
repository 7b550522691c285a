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
from halfstep.precision.local import hand_over_, local_gradient, local_parameters
from halfstep.precision.optimizer_masters import (
    Gradients,
    KeepsMasters,
    OptimizerMasters,
    Parts,
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

    def replace(self, gradients: Gradients) -> None:
        """Set finished gradients: the sums over all ranks; other parameters keep theirs."""

    def clear(self) -> None:
        """Forget all gradients."""

    def update_(self, optimizers: Sequence[Optimizer], gradients: Gradients, factor: float) -> None:
        """Let the optimizers step with the gradients times ``factor``, down to the weights."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and what the weight stands for, exact, one after the other."""

    def load_(self, values: Mapping[str, Tensor]) -> None:
        """Set every weight from :meth:`items`, of this policy or of another."""


class NoMasters:
    """The model's parameters are the masters; of sharded ones, this rank's parts."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], parts: Parts) -> None:
        self._model = model
        self._optimizers = optimizers
        self._parts = parts
        for name, weight in model.named_parameters():
            if name in parts and weight.requires_grad:
                weight.grad = None
                weight.register_post_accumulate_grad_hook(_ToMaster(parts[name]))  # type: ignore[no-untyped-call]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's own trainable parameters, or their parts."""
        named = self._model.named_parameters()
        return {n: self._parts.get(n, p) for n, p in named if p.requires_grad}

    def covers(self, parameter: nn.Parameter) -> bool:
        """Always."""
        return True

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Each parameter's own ``grad``."""
        return {p: p.grad for p in parameters if p.grad is not None}

    def replace(self, gradients: Gradients) -> None:
        """Set ``grad``, in the parameter's dtype."""
        _replace(gradients)

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
        parts: Parts,
    ) -> None:
        """Take fp32 copies, cast the model in place, and give the optimizers the copies.

        Args:
            model: Its Parameter objects stay the same objects; only their storage changes. Masters
                start from the values before the cast.
            param_dtype: torch.bfloat16 or torch.float16, or one for each parameter by name; an fp32
                one is its own master.
            optimizers: Their groups' parameters are replaced.
            parts: Of sharded parameters, which have the dtype already.
        """
        self._masters: dict[str, nn.Parameter] = {}
        self._weights: list[Tensor] = []
        self._copies: list[nn.Parameter] = []
        self._optimizers = optimizers
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.is_floating_point():
                continue
            weight = parts.get(name, parameter)
            if not isinstance(param_dtype, torch.dtype) and param_dtype[name] == torch.float32:
                self._masters[name] = weight
            else:
                self._masters[name] = nn.Parameter(weight.detach().float().clone())
                self._weights.append(weight)
                self._copies.append(self._masters[name])
            if self._masters[name] is not parameter:
                parameter.grad = None
                parameter.register_post_accumulate_grad_hook(_ToMaster(self._masters[name]))  # type: ignore[no-untyped-call]
        self._known = set(self._masters.values())
        cast_parameters_(model, param_dtype)
        replacements = dict(zip(self._weights, self._copies, strict=True))
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

    def replace(self, gradients: Gradients) -> None:
        """Set the masters' ``grad``, in fp32."""
        _replace(gradients)

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
    """Add a finished gradient to the master's, or the part's, in its dtype, and free it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, weight: Tensor) -> None:
        gradient = local_gradient(weight)
        if gradient is None:
            return
        if self._master.grad is None:
            self._master.grad = gradient.to(self._master.dtype)
        else:
            self._master.grad.add_(gradient)
        weight.grad = None


def _replace(gradients: Gradients) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.to(parameter.dtype)


def _clear(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def make_masters(
    policy: PrecisionPolicy, model: nn.Module, optimizers: Sequence[Optimizer]
) -> MasterWeights:
    """Cast the model to the policy's weights and give the optimizers what they shall update.

    Of sharded parameters that is this rank's part (:mod:`halfstep.precision.local`).

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
    parts = local_parameters(model)
    hand_over_(optimizers, model, parts)
    if policy.has_masters:
        return Fp32Masters(model, parameter_dtypes(policy, model), optimizers, parts)
    if policy.update != "nearest":
        return OptimizerMasters(model, policy, optimizers, parts)
    if policy.is_pure:
        cast_parameters_(model, parameter_dtypes(policy, model))
    return NoMasters(model, optimizers, parts)
