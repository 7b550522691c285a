"""Keeps what a model's linear layers multiply in one step, and rounds those products alone.

A linear layer multiplies its input ``x``, weight ``w`` and output gradient ``g`` (see
:mod:`halfstep.precision.policy.recipe`). One forward and backward in the reference format gives all
three, of every layer; each product can then be computed in another format without another pass.
The rounding itself is that of training: a layer of its own runs under the policy.

Shapes: N tokens, K input features, O output features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS
from halfstep.precision.policy.recipe import KEPT, PRODUCTS, SCHEMES
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision

LossFn = Callable[[Any, Any], Tensor]
"""From model and batch to the mean loss, a scalar."""
Formats = Mapping[tuple[str, str], str]
"""From a layer's name and a product's to its format; what is left out is in the reference."""
REFERENCES = {"bf16": "bf16-mixed", "fp32": "fp32"}
"""The format that others are compared with, and its policy."""
HALF = "fp16"
_LARGEST = 2.0**15
"""To what the largest gradient is scaled in fp16: half of its range, and a power of two."""


@dataclass(slots=True)
class Layer:
    """A linear layer, and what it multiplied: one pair of input and gradient for each call."""

    name: str
    weight_OK: Tensor
    position: int = -1
    """When it was called first, counted over all layers."""
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Input (N, K) and output gradient (N, O)."""

    def flops(self) -> int:
        """Floating-point operations of one of its products."""
        return 2 * self.weight_OK.numel() * sum(len(x) for x, _ in self.calls)

    def allows(self, product: str, form: str) -> bool:
        """Whether its features fill the format's blocks, square ones of weights included."""
        if form not in SCHEMES or product == "wgrad":  # its tokens are padded
            return True
        scheme, (outputs, inputs) = SCHEMES[form], self.weight_OK.shape
        summed, other = (inputs, outputs) if product == "fprop" else (outputs, inputs)
        tall = (BLOCK_FORMATS[scheme.weights].block or (1, 1))[0]
        return not (summed % scheme.block or other % tall)


@dataclass(frozen=True, slots=True)
class Step:
    """One step in the reference format: its layers and gradients."""

    layers: list[Layer]
    gradient: dict[str, Tensor]
    scale: float
    """The loss scale at which fp16 holds the largest gradient."""


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that a rule can give a format, by their first name.

    Raises:
        PrecisionError: If there is none.
    """
    try:
        every = place(parse_policy("bf16-mixed,recipe=fp8,simulate=yes"), model)
    except PrecisionError as error:
        raise PrecisionError(
            "advise chooses formats for linear layers, and the model has none that is a "
            "torch.nn.Linear, keeps its forward and shares no embedding's weight"
        ) from error
    return {placement.name: placement.module for placement in every.low}


def policy_of(formats: Formats, reference: str) -> str:
    """The policy, as a field string, that gives each layer and product its format."""
    if reference == "fp32":
        kept = [f"{name}:fp32" for name, form in by_layer(formats).items() if form[0] != HALF]
        return "fp16-mixed" + (f",rules={'|'.join(kept)}" if kept else "")
    low = [
        f"{name}:{'/'.join(forms)}"
        for name, forms in by_layer(formats).items()
        if set(forms) != {KEPT}
    ]
    base = REFERENCES[KEPT]
    return f"{base},simulate=yes,rules={'|'.join(low)}" if low else base


def by_layer(formats: Formats) -> dict[str, tuple[str, ...]]:
    """The formats of each layer's three products; bf16 where none is given."""
    names = dict.fromkeys(name for name, _ in formats)
    return {n: tuple(formats.get((n, product), KEPT) for product in PRODUCTS) for n in names}


@contextmanager
def under(policy: str, model: nn.Module) -> Iterator[Precision]:
    """A copy of the model under a policy, which is taken off again at the end."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    trained = [p for p in copied.parameters() if p.requires_grad]
    precision = Precision(policy, copied, torch.optim.SGD(trained, lr=1.0))
    try:
        yield precision
    finally:
        precision.close()


def backward(precision: Precision, loss_fn: LossFn, batch: Any, seed: int) -> float:
    """Run forward and backward of a batch with dropout by the seed, and return the loss."""
    torch.manual_seed(seed)
    with precision.autocast():
        loss = loss_fn(precision.model, batch)
    precision.backward(loss)
    return float(loss.detach())


def gradient_under(
    policy: str, model: nn.Module, batch: Any, loss_fn: LossFn, draws: int = 1
) -> list[dict[str, Tensor]]:
    """The gradients of a batch under a policy: as many as draws of its random bits."""
    found = []
    with under(policy, model) as precision:
        for _ in range(draws):
            backward(precision, loss_fn, batch, 0)
            found.append(_gradients(precision.model))
            for parameter in precision.model.parameters():
                parameter.grad = None
            precision.clock.step += 1  # other random bits
    return found


def take_step(model: nn.Module, batch: Any, loss_fn: LossFn, reference: str) -> Step:
    """Run one batch in the reference format, and keep what each linear layer multiplies.

    Raises:
        PrecisionError: If the loss is not finite, or differs when it is computed again.
    """
    policy = REFERENCES[reference]
    with under(policy, model) as precision:
        modules = linear_layers(precision.model)
        layers = {name: Layer(name, _rows(module)) for name, module in modules.items()}
        hooks = [modules[name].register_forward_hook(_keep(layers, name)) for name in layers]
        loss = backward(precision, loss_fn, batch, 0)
        for hook in hooks:
            hook.remove()
        gradient = _gradients(precision.model)
        precision.discard()
        # hooks keep layers apart that a kernel would fuse, with other roundings: again with hooks
        for module in modules.values():
            module.register_forward_hook(lambda *_: None)
        again = backward(precision, loss_fn, batch, 0)
    if not math.isfinite(loss):
        raise PrecisionError(f"the loss is {loss} in {policy}; advise needs one that is finite")
    if loss != again:
        raise PrecisionError(
            f"loss_fn returned {loss:.9g} and then {again:.9g} for the same batch, weights and "
            "seed; advise compares formats by their errors, so make it a function of these alone"
        )
    if not any(bool(grad.any()) for grad in gradient.values()):
        raise PrecisionError(
            "loss_fn's gradient is 0 for every weight, so no error of it can be measured"
        )
    called = [layer for layer in layers.values() if layer.calls]
    largest = max((float(g.abs().max()) for layer in called for _, g in layer.calls), default=0.0)
    scale = 2.0 ** min(24, torch.tensor(_LARGEST / max(largest, 1e-30)).log2().floor().item())
    return Step(sorted(called, key=lambda layer: layer.position), gradient, scale)


def _rows(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return (weight if isinstance(module, nn.Linear) else weight.t()).float().clone()


def _keep(layers: dict[str, Layer], name: str) -> Callable[..., None]:
    layer = layers[name]

    def hook(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if layer.position < 0:
            layer.position = sum(other.position >= 0 for other in layers.values())
        x = args[0].detach().float().reshape(-1, args[0].shape[-1]).clone()

        def arrived(g: Tensor) -> None:
            layer.calls.append((x, g.detach().float().reshape(-1, g.shape[-1]).clone()))

        if y.requires_grad:
            y.register_hook(arrived)  # type: ignore[no-untyped-call]

    return hook


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: grad.detach().float().clone() for name, grad in found.items()}


def products(layer: Layer, form: str, draws: int, scale: float) -> Sequence[list[Tensor]]:
    """The layer's three products in a format, in fp32: as many of each as draws.

    Returns:
        For each draw: the outputs (N, O), input gradients (N, K) and weight gradient (O, K), of
        all calls behind each other, the weight gradient summed over them.
    """
    if form in (HALF, "fp32"):
        return [_joined([_in_half(layer.weight_OK, x, g, form, scale) for x, g in layer.calls])]
    recipe = "/".join(form if layer.allows(product, form) else KEPT for product in PRODUCTS)
    outputs, inputs = layer.weight_OK.shape
    linear = nn.Linear(inputs, outputs, bias=False, device=layer.weight_OK.device)
    with torch.no_grad():
        linear.weight.copy_(layer.weight_OK)
    alone = nn.Sequential(linear)
    low = form != KEPT
    policy = f"bf16-mixed,recipe={recipe},simulate=yes" if low else REFERENCES[KEPT]
    found = []
    with under(policy, alone) as precision:
        (weight,) = precision.model.parameters()
        for draw in range(draws):
            precision.clock.step = draw
            parts = []
            for given, g in layer.calls:
                x = given.clone().requires_grad_()
                with precision.autocast():
                    y = precision.model(x)
                y.backward(g.to(y.dtype))
                assert x.grad is not None
                assert weight.grad is not None
                parts.append([y.detach().float(), x.grad.float(), weight.grad.float().clone()])
                weight.grad = None
            found.append(_joined(parts))
    return found


def _in_half(w: Tensor, x: Tensor, g: Tensor, form: str, scale: float) -> list[Tensor]:
    """The products of one call in fp32, or with operands and results rounded to fp16."""
    if form == "fp32":
        return [x @ w.t(), g @ w, g.t() @ x]
    x, w, g = x.half().float(), w.half().float(), (g * scale).half().float()
    y, dx, dw = x @ w.t(), g @ w, g.t() @ x
    return [y.half().float(), dx.half().float() / scale, dw.half().float() / scale]


def _joined(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    ys, dxs, dws = zip(*parts, strict=True)
    return [torch.cat(ys), torch.cat(dxs), torch.stack(dws).sum(0)]
