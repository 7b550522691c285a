"""Measures how much gradient error each linear layer and matmul makes in a format below 16 bits.

A batch's gradient is computed once in bf16, and once for each matmul (``fprop``, ``dgrad``,
``wgrad``) of each linear layer with that matmul alone in the other format. With G the gradient of
all parameters and dG its change, the error is ``|dG|^2 / |G|^2``.

Where a format rounds stochastically, the gradient is the mean of several draws, as an optimizer
averages over steps: without that, stochastic rounding would look worse than rounding to nearest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.precision.policy.recipe import KEPT, PRODUCTS, SCHEMES
from halfstep.precision.policy.rules import place, unfilled
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision

LossFn = Callable[[Any, Any], Tensor]
"""From model and batch to the mean loss, a scalar."""
REFERENCE = "bf16-mixed"
_DRAWS = 8


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The errors of every linear layer in a format.

    Attributes:
        format: Its name.
        layers: Their qualified names.
        errors: Of layer and matmul (``"fprop"``, ``"dgrad"`` or ``"wgrad"``) to the square of the
            gradient's change, relative to its own; infinite where it is not finite. A matmul is
            missing where the layer's features fill no whole blocks of the format.
    """

    format: str
    layers: tuple[str, ...]
    errors: Mapping[tuple[str, str], float]

    def policy(self, most: float) -> str:
        """Spell a policy: bf16 for matmuls with an error above ``most``, else the format."""
        low = {key for key, error in self.errors.items() if error <= most}
        rules = []
        for layer in self.layers:
            forms = [self.format if (layer, m) in low else KEPT for m in PRODUCTS]
            if KEPT in forms:
                rules.append(f"{layer}:{'/'.join(forms)}")
        return f"{self.format},simulate=yes" + (f",rules={'|'.join(rules)}" if rules else "")


def sensitivity(
    model: nn.Module, batches: Sequence[Any], loss_fn: LossFn, form: str = "nvfp4"
) -> Sensitivity:
    """Measure the gradient error that each linear layer and matmul makes alone in a format.

    It takes three passes over each batch for a linear layer, eight times as many for a format that
    rounds stochastically.

    Args:
        model: Plain, on its device, with trained weights: a new model's errors are others. It is
            not changed; copies of it run.
        batches: What ``loss_fn`` takes; errors are averaged over them.
        loss_fn: A function of model, batch and torch's random numbers alone.
        form: A format that recipes have, such as ``"mxfp8"`` or ``"nvfp4"``.

    Raises:
        PrecisionError: If the format is unknown, there is no linear layer, or a gradient in bf16
            is 0 or not finite.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        >>> batches = [torch.randn(64, 32) for _ in range(2)]
        >>> found = sensitivity(model, batches, lambda model, x: (model(x) - x).square().mean())
        >>> len(found.errors)
        6
    """
    if form not in SCHEMES:
        raise PrecisionError(f"format {form!r}; allowed: {', '.join(SCHEMES)}")
    if not batches:
        raise PrecisionError("batches is empty; give at least one")
    placed = place(parse_policy(f"{REFERENCE},recipe=fp8,simulate=yes"), model)
    layers = {one.name: one.module for one in placed.low}
    references = [gradients(REFERENCE, model, batch, loss_fn) for batch in batches]
    for size in map(_square, references):
        if not 0 < size < math.inf:
            raise PrecisionError(
                f"the squared gradient is {size:g} in {REFERENCE}, so no error of it can be "
                "measured; give weights and batches where it is finite and above 0"
            )
    draws, errors = _DRAWS if SCHEMES[form].stochastic else 1, {}
    for name, layer in layers.items():
        for matmul in (m for m in PRODUCTS if not unfilled(layer, m, form)):
            recipe = "/".join(form if m == matmul else KEPT for m in PRODUCTS)
            policy, changes = f"{REFERENCE},simulate=yes,rules={name}:{recipe}", []
            for batch, reference in zip(batches, references, strict=True):
                found = gradients(policy, model, batch, loss_fn, draws)
                changes.append(_change(found, reference))
            errors[name, matmul] = fmean(changes)
    return Sensitivity(form, tuple(layers), errors)


def _change(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    change = _square({n: found[n] - g for n, g in reference.items()}) / _square(reference)
    return change if math.isfinite(change) else math.inf


def gradients(
    policy: str, model: nn.Module, batch: Any, loss_fn: LossFn, draws: int = 1
) -> dict[str, Tensor]:
    """Compute the gradients of a batch under a policy, the mean over draws of its random bits."""
    copied = copy.deepcopy(model)
    trained = [p for p in copied.parameters() if p.requires_grad]
    precision = Precision(policy, copied, torch.optim.SGD(trained, lr=1.0))
    found: dict[str, Tensor] = {}
    try:
        for draw in range(draws):
            precision.clock.step = draw
            copied.zero_grad()
            torch.manual_seed(0)  # the same dropout in every pass
            with precision.autocast():
                loss = loss_fn(precision.model, batch)
            precision.backward(loss)
            for name, p in precision.model.named_parameters():
                if p.grad is not None:
                    found[name] = found.get(name, 0.0) + p.grad.double() / draws
    finally:
        precision.close()
    return found


def _square(parts: Mapping[str, Tensor]) -> float:
    return sum(float(part.double().square().sum()) for part in parts.values())
