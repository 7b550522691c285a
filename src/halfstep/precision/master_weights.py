"""Who owns the weights that the optimizer updates.

With 16-bit weights an update smaller than half the gap between neighbouring numbers rounds to
nothing: at 1.0 the bf16 gap is 2^-7, so 100 updates of 1e-3 leave 1.0. Master weights are an fp32
copy that the optimizer updates and from which the 16-bit weights are rounded after every step.

Gradients move from the 16-bit parameter into the master's fp32 ``grad`` as soon as autograd has
finished each of them, so micro-batches add up in fp32 and no full set of 16-bit gradients ever
exists.

**Source:** Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.precision.cast import cast_parameters_
from halfstep.precision.policy import PrecisionPolicy


class MasterWeights(Protocol):
    """The optimizer's view of the weights; :class:`NoMasters` is the null object."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trainable tensors that the optimizer updates, under the model's names."""

    def covers(self, parameter: nn.Parameter) -> bool:
        """Whether an update of ``parameter`` by the optimizer reaches the model in full."""

    def push_(self) -> None:
        """Round the masters into the model's weights."""


class NoMasters:
    """The model's parameters are the masters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own trainable parameters."""
        return ((n, p) for n, p in self._model.named_parameters() if p.requires_grad)

    def covers(self, parameter: nn.Parameter) -> bool:
        """Always."""
        return True

    def push_(self) -> None:
        """Do nothing: there is only one copy."""


class Fp32Masters:
    """An fp32 copy of every trainable parameter, and 16-bit weights in the model."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, param_dtype: torch.dtype) -> None:
        """Take fp32 copies, then cast the model's floating parameters in place.

        Args:
            model: Its Parameter objects stay the same objects; only their storage changes. Masters
                start from the values before the cast.
            param_dtype: torch.bfloat16 or torch.float16.
        """
        self._masters: dict[str, nn.Parameter] = {}
        self._weights: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                self._masters[name] = nn.Parameter(parameter.detach().float().clone())
                self._weights.append(parameter)
        self._known = set(self._masters.values())
        cast_parameters_(model, param_dtype)
        for weight, master in self.replacements().items():
            weight.grad = None
            weight.register_post_accumulate_grad_hook(_GradientMove(master))  # type: ignore[no-untyped-call]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The fp32 masters under their weights' names."""
        return iter(self._masters.items())

    def covers(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of the masters."""
        return parameter in self._known

    def replacements(self) -> dict[Tensor, nn.Parameter]:
        """Model weight to master, for swapping them in an optimizer."""
        return dict(zip(self._weights, self._masters.values(), strict=True))

    @torch.no_grad()
    def push_(self) -> None:
        """Round every master to nearest into its 16-bit weight."""
        torch._foreach_copy_(self._weights, list(self._masters.values()))


class _GradientMove:
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


def make_masters(policy: PrecisionPolicy, model: nn.Module, optimizer: Optimizer) -> MasterWeights:
    """Cast the model to the policy's weights and give the optimizer what it shall update.

    Args:
        policy: Says whether there are masters, and the format of the weights.
        model: Its floating parameters are cast in place to ``param_dtype``.
        optimizer: Its parameter groups get the masters in the weights' places.
    """
    if policy.has_masters:
        masters = Fp32Masters(model, policy.param_dtype)
        replacements = masters.replacements()
        for group in optimizer.param_groups:
            group["params"] = [replacements.get(p, p) for p in group["params"]]
        return masters
    if policy.is_pure:
        cast_parameters_(model, policy.param_dtype)
    return NoMasters(model)
