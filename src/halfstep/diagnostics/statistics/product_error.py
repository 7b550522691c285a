"""What recipes below 16 bits would change of a linear layer's products, bias apart from spread.

A few entries of each of the three products are computed from the layer's own operands, in full
precision and as the recipe rounds them: blocks along what the product sums over, a Hadamard matrix
before and random bits where it has them. Errors are relative to the norm of the entries::

    bias     of the mean of several draws; where nothing is drawn, all of the error
    spread   the standard deviation of a draw, which averages away over steps

Which rows of an operand are taken: some spread evenly, and those with its largest magnitude, so
that a scale of the whole tensor is the tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from halfstep.diagnostics.statistics.rounding_error import bias_and_variance
from halfstep.errors import DataError
from halfstep.formats import block_format
from halfstep.precision.low_bit.hadamard import mixed
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.rounding import random_bits
from halfstep.precision.policy.recipe import OPERANDS, PRODUCTS, SCHEMES, Scheme

ROWS, TOKENS, DRAWS = 32, 2048, 4
_STREAM = 0x9D0D


@dataclass(frozen=True, slots=True)
class ProductError:
    """What a recipe would change of one product of a linear layer, relative to the product.

    Attributes:
        layer: The layer's qualified name.
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        recipe: Such as ``"nvfp4"``.
        bias: What stays when steps are averaged.
        spread: What differs from draw to draw; 0 where nothing is drawn.
    """

    layer: str
    product: str
    recipe: str
    bias: float
    spread: float

    @property
    def error(self) -> float:
        """The relative error of one step."""
        return math.hypot(self.bias, self.spread)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        """Read what :meth:`to_dict` gave.

        Raises:
            DataError: If a field is missing or not what it must be.
        """
        try:
            layer, product, recipe = (str(fields[key]) for key in ("layer", "product", "recipe"))
            bias, spread = (float(fields[key]) for key in ("bias", "spread"))
            if product not in PRODUCTS or not (0 <= bias < math.inf and 0 <= spread < math.inf):
                raise ValueError(fields)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"not the error of a product: {str(fields)[:80]}") from error
        return cls(layer, product, recipe, bias, spread)


class ProductErrors:
    """Measures the products of a step, from the first call of each linear layer in it.

    Args:
        recipes: Names of schemes, entries of ``SCHEMES``.
    """

    def __init__(self, recipes: Sequence[str]) -> None:
        self._schemes = [SCHEMES[name] for name in recipes]
        self._found: dict[tuple[str, str, str], ProductError] = {}
        self._called: set[str] = set()

    @torch.no_grad()
    def called(self, name: str, layer: nn.Module, x: Tensor) -> Callable[[Tensor], None] | None:
        """Measure ``fprop``, and return what measures the others, given the output's gradient.

        Args:
            name: The layer's name.
            layer: A linear layer; one whose weight is sharded is left out.
            x: Its input, (..., K).
        """
        weight: Any = layer.weight
        if not self._schemes or name in self._called or is_sharded(weight) or not x.numel():
            return None
        self._called.add(name)
        w_OK = weight.detach() if isinstance(layer, nn.Linear) else weight.detach().t()
        x_NK = x.detach().reshape(-1, x.shape[-1])
        inputs, weights = _Rows(x_NK), _Rows(w_OK)
        transposed = _Rows(x_NK[:TOKENS].t())
        kept = {scheme.inputs: transposed.of(scheme.inputs) for scheme in self._schemes}
        for scheme in self._schemes:
            operands = inputs.of(scheme.inputs), weights.of(scheme.weights)
            self._add(name, "fprop", scheme, *operands)

        @torch.no_grad()
        def differentiated(gradient: Tensor) -> None:
            g_NO = gradient.detach().reshape(-1, gradient.shape[-1])
            gradients, weights = _Rows(g_NO), _Rows(w_OK.t())
            transposed = _Rows(g_NO[:TOKENS].t())
            for scheme in self._schemes:
                operands = gradients.of(scheme.gradients), weights.of(scheme.weights)
                self._add(name, "dgrad", scheme, *operands)
                g = transposed.of(scheme.gradients)
                self._add(name, "wgrad", scheme, g, kept[scheme.inputs])

        return differentiated

    def read(self) -> list[ProductError]:
        """What was measured, in the order of the calls."""
        return list(self._found.values())

    def _add(self, name: str, product: str, scheme: Scheme, a: Tensor, b: Tensor) -> None:
        found = product_error(a, b, scheme, product)
        if found is not None:
            self._found[name, product, scheme.name] = ProductError(
                name, product, scheme.name, *found
            )


def product_error(
    a: Tensor, b: Tensor, scheme: Scheme, product: str, *, draws: int = DRAWS
) -> tuple[float, float] | None:
    """Bias and spread of ``a b^T`` with operands rounded as a scheme says.

    Args:
        a: (rows, L), the product's first operand, with what is summed over last; bf16 numbers.
        b: (rows, L), the second.
        scheme: Its formats, and whether it mixes and draws.
        product: Which one it is.
        draws: How often random bits are drawn, at least 2.

    Returns:
        None where no block is full or the product is 0 or not finite.
    """
    length = min(a.shape[1], b.shape[1]) // scheme.block * scheme.block
    a, b = a[:, :length], b[:, :length]
    exact = a.double() @ b.double().t()
    size = float(exact.norm()) if length else 0.0
    if not 0 < size < math.inf:
        return None
    if product == "wgrad" and scheme.hadamard:
        a, b = (mixed(x.t().contiguous().bfloat16()).t().float() for x in (a, b))
    left, right = (block_format(getattr(scheme, operand)) for operand in OPERANDS[product])
    drawn = draws if scheme.stochastic and product != "fprop" else 1
    rounded = right.fake_quantize(b.contiguous()).double().t()

    def off(draw: int) -> Tensor:
        bits = random_bits(draw, 0, a.shape, stream=_STREAM, device=a.device) if drawn > 1 else None
        return left.fake_quantize(a.contiguous(), bits=bits).double() @ rounded - exact

    bias, variance = bias_and_variance([off(draw)] for draw in range(drawn))
    if not math.isfinite(bias + variance):
        return None
    return math.sqrt(bias) / size, math.sqrt(variance) / size


class _Rows:
    """Some whole rows of blocks of a matrix as fp32 with bf16 numbers, and its largest one's."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._found: dict[int, Tensor] = {}  # by the height of a block

    def of(self, name: str) -> Tensor:
        """Rows for a format, the same for all whose blocks are as tall."""
        block = block_format(name).block
        height = 1 if block is None else block[0]
        if height not in self._found:
            self._found[height] = self._take(height)
        return self._found[height]

    def _take(self, height: int) -> Tensor:
        x = self._x
        blocks = len(x) // height
        if not blocks or not x.shape[1]:
            return x[:0].float()
        take = torch.linspace(0, blocks - 1, min(blocks, max(ROWS // height, 1))).round().tolist()
        largest = int(x[: blocks * height].abs().amax(1).argmax()) // height
        starts = torch.tensor(sorted({int(at) for at in take} | {largest}), device=x.device)
        at = (starts[:, None] * height + torch.arange(height, device=x.device)).reshape(-1)
        return x[at].bfloat16().float()
