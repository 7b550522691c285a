"""How much of the gradient's error each linear layer, product and format makes.

The error is ``|dG|^2 / |G|^2``, where G is the gradient of all parameters in the reference format
and dG what one product in another format changes of it. It follows from products that are computed
alone, out of what one step kept::

    wgrad   |dW' - dW|^2: the product's error is the gradient's, exactly
    fprop   sum over tokens of |g|^2 |y' - y|^2: what the error of an output may change of the loss
    dgrad   |dx' - dx|^2, each channel relative to the size of its inputs (what comes before has
            made those larger or smaller, and does the same to their gradients), times the share of
            the squared gradient that lies before the layer, for that is what it disturbs

The last two rank the layers; they have no scale of their own. One pass each, with all layers in the
format at once, gives it: the true error divided by the sum of the estimates. docs/advise.md
has their rank correlation with passes that round one product at a time.

Random bits are drawn several times. The mean of the draws' errors is the *bias*, and the rest the
*variance*, which an optimizer averages over steps: it counts by one tenth, for Adam's momentum of
0.9 averages ten. Without this, stochastic rounding would look worse than rounding to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.diagnostics.advise.layers import (
    HALF,
    Layer,
    LossFn,
    Step,
    gradient_under,
    policy_of,
    products,
    take_step,
)
from halfstep.diagnostics.statistics.rounding_error import bias_and_variance
from halfstep.precision.policy.recipe import KEPT, PRODUCTS, SCHEMES

AVERAGED = 10
"""Over how many steps an optimizer averages what has no bias. **Source:** Adam's beta1 of 0.9."""
DRAWS = 4


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one product of one layer in one format changes of the gradient.

    Attributes:
        layer: The layer's qualified name.
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        format: Such as ``"nvfp4"``.
        bias: Squared error of the gradient's mean over random draws, relative to its square.
        variance: The same of the draws around their mean; 0 where nothing is drawn.
        relative: Relative error of the product itself.
        flops: Floating-point operations of the product in one batch.
        overflowed: Share of results that are infinite or NaN.
        flushed: Share of gradients that became 0.
    """

    layer: str
    product: str
    format: str
    bias: float
    variance: float
    relative: float
    flops: int
    overflowed: float = 0.0
    flushed: float = 0.0

    @property
    def error(self) -> float:
        """What it adds to the error of the gradient; infinite where a result is not finite."""
        return self.bias + self.variance / AVERAGED


def sensitivities(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn,
    formats: Sequence[str],
    *,
    by_passes: bool = False,
) -> list[Sensitivity]:
    """The error that each layer, product and format makes alone.

    Args:
        model: Not changed; its copies run.
        batches: A step is taken on each, and errors are averaged.
        loss_fn: From model and batch to the mean loss.
        formats: ``"bf16"`` or ``"fp32"`` first, which is the reference.
        by_passes: Take a pass for each layer, product and format instead of computing products
            alone: slow, and the truth. Not for fp16.

    Returns:
        One for each layer, product and format that the layer's sizes allow, in order of the calls.

    Raises:
        PrecisionError: If the loss is not a finite function of model, batch and seed.
    """
    found: dict[tuple[str, str, str], list[Sensitivity]] = {}
    for batch in batches:
        step = take_step(model, batch, loss_fn, formats[0])
        for form in formats:
            if form == formats[0]:
                rows = [
                    _none(layer, product, form) for layer in step.layers for product in PRODUCTS
                ]
            elif by_passes:
                rows = _by_passes(model, batch, loss_fn, step, form)
            else:
                rows = _by_products(model, batch, loss_fn, step, form)
            for row in rows:
                found.setdefault((row.layer, row.product, row.format), []).append(row)
    return [_mean(rows) for rows in found.values()]


def _by_products(
    model: nn.Module, batch: Any, loss_fn: LossFn, step: Step, form: str
) -> list[Sensitivity]:
    draws, before = _draws(form), _before(step)
    rows = [
        row
        for layer in step.layers
        for row in _of_layer(layer, form, draws, step, before[layer.name])
    ]
    factors = {"wgrad": 1.0}
    for product in ("fprop", "dgrad"):
        every = [row for row in rows if row.product == product and row.bias < math.inf]
        expected = sum(row.bias + row.variance for row in every)
        found = sum(row.relative**2 for row in every) / max(len(every), 1)  # where no pass is made
        if form in SCHEMES:
            together = {(row.layer, product): form for row in every}
            drawn = draws if product == "dgrad" else 1
            found = sum(_true_error(model, batch, loss_fn, step, together, drawn))
        factors[product] = found / expected if expected and found < math.inf else 1.0
    return [
        replace(row, bias=row.bias * factor, variance=row.variance * factor)
        for row in rows
        for factor in [factors[row.product]]
    ]


def _none(layer: Layer, product: str, form: str) -> Sensitivity:
    """That of the reference: it is what the others are compared with."""
    return Sensitivity(layer.name, product, form, 0.0, 0.0, 0.0, layer.flops())


def _draws(form: str) -> int:
    return DRAWS if form in SCHEMES and SCHEMES[form].stochastic else 1


def _by_passes(
    model: nn.Module, batch: Any, loss_fn: LossFn, step: Step, form: str
) -> list[Sensitivity]:
    draws = _draws(form)
    rows = []
    for layer in step.layers:
        for product in PRODUCTS:
            if layer.allows(product, form):
                alone = {(layer.name, product): form}
                bias, variance = _true_error(model, batch, loss_fn, step, alone, draws)
                row = Sensitivity(
                    layer.name, product, form, bias, variance, math.nan, layer.flops()
                )
                rows.append(row)
    return rows


def _true_error(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    step: Step,
    formats: dict[tuple[str, str], str],
    draws: int,
) -> tuple[float, float]:
    """Bias and variance of the gradient of a pass with some products in some formats."""
    policy = policy_of(formats, KEPT)
    found = gradient_under(policy, model, batch, loss_fn, draws)
    whole = _square(step.gradient.values())
    errors = [[grad[name] - g for name, g in step.gradient.items()] for grad in found]
    return _bias_and_variance([[*e] for e in errors], whole)


def _bias_and_variance(errors: Sequence[Sequence[Tensor]], whole: float) -> tuple[float, float]:
    """:func:`bias_and_variance` relative to a square; infinite where an error is not finite."""
    bias, variance = bias_and_variance(errors)
    if not math.isfinite(bias + variance):
        return math.inf, 0.0
    return bias / whole, variance / whole


def _of_layer(layer: Layer, form: str, draws: int, step: Step, before: float) -> list[Sensitivity]:
    exact = products(layer, "fp32", 1, 1.0)[0]
    found = products(layer, form, draws, step.scale)
    x_NK, g_NO = (torch.cat(parts) for parts in zip(*layer.calls, strict=True))
    small = (g_NO * step.scale).half() == 0 if form == HALF else g_NO == 0
    flushed = float((small & (g_NO != 0)).float().mean())
    channels_K = x_NK.square().mean(0).sqrt()
    typical = channels_K.median().clamp(min=1e-30)
    weights = {
        "fprop": g_NO.norm(dim=1, keepdim=True),
        "dgrad": channels_K / typical * math.sqrt(before),
        "wgrad": torch.ones((), device=g_NO.device),
    }
    whole = _square(step.gradient.values())
    rows = []
    for number, product in enumerate(PRODUCTS):
        if not layer.allows(product, form):
            continue
        right = exact[number]
        errors = [draw[number] - right for draw in found]
        bias, variance = _bias_and_variance([[e * weights[product]] for e in errors], whole)
        relative = math.sqrt(sum(map(_square_of, errors)) / draws / max(_square_of(right), 1e-38))
        lost = 1 - float(found[0][number].isfinite().float().mean())
        row = Sensitivity(layer.name, product, form, bias, variance, relative, layer.flops())
        rows.append(replace(row, overflowed=lost, flushed=flushed))
    return rows


def _before(step: Step) -> dict[str, float]:
    """The share of the squared gradient that lies before each layer.

    Parameters outside of linear layers count with the linear layer that follows them in the model.
    """
    whole = _square(step.gradient.values())
    shares: dict[str, float] = {}
    waiting, at = 0.0, 0.0
    weights = {f"{layer.name}.weight".removeprefix("."): layer.name for layer in step.layers}
    own: dict[str, float] = dict.fromkeys(weights.values(), 0.0)
    for name, grad in step.gradient.items():
        waiting += _square([grad])
        if name in weights:
            own[weights[name]] += waiting
            waiting = 0.0
    for layer in step.layers:
        # its own weight comes first in it: of its own share only what stood before belongs here
        mine = _square([step.gradient[f"{layer.name}.weight".removeprefix(".")]])
        shares[layer.name] = (at + own[layer.name] - mine) / whole
        at += own[layer.name]
    return shares


def _square_of(x: Tensor) -> float:
    return float(x.double().square().sum())


def _square(parts: Iterable[Tensor]) -> float:
    return sum(map(_square_of, parts))


def _mean(rows: Sequence[Sensitivity]) -> Sensitivity:
    first = rows[0]
    means = [
        sum(getattr(row, key) for row in rows) / len(rows)
        for key in ("bias", "variance", "relative")
    ]
    lost, flushed = (max(getattr(row, key) for row in rows) for key in ("overflowed", "flushed"))
    flops = sum(row.flops for row in rows)
    bias, variance, relative = means
    more = {"overflowed": lost, "flushed": flushed, "flops": flops}
    return replace(first, bias=bias, variance=variance, relative=relative, **more)
