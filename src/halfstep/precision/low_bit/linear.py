"""Linear layers that multiply below 16 bits, as a policy's recipe says.

Each operand is rounded to blocks along the dim that its product sums over. Where the device has
such a product, it multiplies the codes (``native.py``). Elsewhere it is simulated: the rounded
numbers are bf16 numbers too, so the product itself runs on the native bf16 kernel, with its fp32
accumulation. A scale of a whole tensor multiplies its result, which is rounded to bf16 before and
after: one rounding more than a tensor core's (``product.py`` has it with one, at the speed of
fp32). Scales of blocks that are fp32 numbers (``fp8-block``) go into fp32 operands of an fp32
product instead.

Shapes: N tokens, K input features, O output features.
"""

from __future__ import annotations

import math
import zlib
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS
from halfstep.precision.casting.region import Region
from halfstep.precision.low_bit.clock import Clock
from halfstep.precision.low_bit.delayed import Call
from halfstep.precision.low_bit.native import scaled_product, why_not_native
from halfstep.precision.low_bit.product import Draw, operand, quantized
from halfstep.precision.policy.recipe import OPERANDS, PRODUCTS, SCHEMES, Recipe, Scheme
from halfstep.precision.policy.rules import Placement, plain_name

_LOW = torch.bfloat16
HADAMARD = 16
"""Tokens that a Hadamard matrix mixes. **Source:** arXiv 2509.25149, appendix C.4."""
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""**Source:** TransformerEngine ``nvfp4_tensor.py``, ``get_wgrad_sign_vector``."""


class LowBitLinear(Region):
    """The forward of a linear layer whose products a recipe rounds below 16 bits.

    Args:
        placement: The layer and its recipe.
        clock: Which step it is.
    """

    def __init__(self, placement: Placement, clock: Clock) -> None:
        super().__init__(placement.module)
        self.recipe, self.clock = placement.recipe, clock
        self.name, self.key = placement.name, plain_name(placement.name)
        self.stream = zlib.crc32(self.key.encode())
        self.by_rows = type(placement.module).forward is nn.Linear.forward
        if clock.history:
            clock.history.track(self.key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, in plain bf16 or fp32 where no product is below that now."""
        module: Any = self.module
        weight, bias = module.weight, module.bias
        recipe = self.clock.recipe(self.recipe)
        low = weight.dtype == _LOW or torch.is_autocast_enabled(weight.device.type)
        if not (low and recipe):
            return self.inside(args, kwargs)
        if isinstance(weight, DTensor):
            raise PrecisionError(
                f"layer {self.name or 'of the model'} multiplies below 16 bits ({recipe}), and its "
                f"weight is distributed over ranks ({tuple(weight.shape)}); keep it by "
                f"keep_bf16={self.name or '*'}, or use data parallelism"
            )
        (x,) = (*args, *kwargs.values())
        weight_OK = weight.to(_LOW) if self.by_rows else weight.to(_LOW).t()
        if x.shape[-1] != weight_OK.shape[1]:
            return self.inside(args, kwargs)  # torch says what is wrong with it
        x_NK = x.to(_LOW).reshape(-1, x.shape[-1])
        bias = None if bias is None else bias.to(_LOW)
        y_NO = _multiply(x_NK, weight_OK, bias, self, recipe)
        return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _multiply(
    x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, layer: LowBitLinear, recipe: Recipe
) -> Tensor:
    if is_functorch_wrapped_tensor(x_NK):
        raise PrecisionError(
            f"layer {layer.name or 'of the model'} multiplies below 16 bits ({recipe}), which "
            f"torch.func (vmap, grad, jvp) cannot transform; keep it by "
            f"keep_bf16={layer.name or '*'}"
        )
    y_NO: Tensor = _Products.apply(x_NK, weight_OK, bias_O, layer, recipe)  # type: ignore[no-untyped-call]
    return y_NO


class _Products(torch.autograd.Function):
    """The three products of a linear layer; see :mod:`halfstep.precision.policy.recipe`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NK: Tensor,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        layer: LowBitLinear,
        recipe: Recipe,
    ) -> Tensor:
        ctx.save_for_backward(x_NK, weight_OK)
        ctx.layer, ctx.recipe, ctx.biased = layer, recipe, bias_O is not None
        history = layer.clock.history
        ctx.call = Call(history, layer.key) if history else None
        return run_product(ctx.call, layer, recipe, "fprop", x_NK, weight_OK, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_OK = ctx.saved_tensors
        grad_NO = grad.to(_LOW)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = run_product(ctx.call, ctx.layer, ctx.recipe, "dgrad", grad_NO, weight_OK)
        if ctx.needs_input_grad[1]:
            dw = run_product(ctx.call, ctx.layer, ctx.recipe, "wgrad", grad_NO, x_NK)
        if ctx.biased and ctx.needs_input_grad[2]:
            db = grad_NO.sum(0, dtype=torch.float32).to(_LOW)
        if ctx.call:
            ctx.call.keep()
        return dx, dw, db, None, None


_SUMMED = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
"""Which dim of its two operands a product sums over."""


def run_product(
    call: Call | None,
    layer: LowBitLinear,
    recipe: Recipe,
    product: str,
    a: Tensor,
    b: Tensor,
    bias_O: Tensor | None = None,
) -> Tensor:
    """One product of a layer in bf16, of operands in bf16, as the recipe says; trace() knows it."""
    scheme = SCHEMES.get(getattr(recipe, product))
    if scheme is None:
        if product == "fprop":
            return F.linear(a, b, bias_O)
        return (a if product == "dgrad" else a.t()) @ b
    if product == "wgrad":
        a, b = _whole_blocks(scheme, a), _whole_blocks(scheme, b)
        if scheme.hadamard:
            a, b = mixed(a), mixed(b)
    kinds, (i, j) = OPERANDS[product], _SUMMED[product]
    left, right = (getattr(scheme, kind) for kind in kinds)
    amaxes: list[Tensor | None] = [None, None]
    if call and scheme.history:
        amaxes = [call.amax(kind, x) for kind, x in zip(kinds, (a, b), strict=True)]
    draw = None if product == "fprop" else _draw(scheme, layer, product)
    if not why_not_native(scheme.name, a.device):
        codes = quantized(left, a, i, draw, amaxes[0]), quantized(right, b, j, amax=amaxes[1])
        wide = scaled_product(*codes)
        return (wide if bias_O is None else wide + bias_O).to(_LOW)
    x, x_scale = _rounded(left, a, i, draw, amaxes[0])
    y, y_scale = _rounded(right, b, j, amax=amaxes[1])
    return _simulated((x if i else x.t(), x_scale), (y.t() if j else y, y_scale), bias_O)


Operand = tuple[Tensor, Tensor | None]
"""Numbers in bf16 and the scale of all of them, if there is one; or in fp32, scaled by blocks."""


def _rounded(
    name: str, x: Tensor, dim: int, draw: Draw | None = None, amax: Tensor | None = None
) -> Operand:
    """A matrix in a block format, whose blocks lie along a dim."""
    form = BLOCK_FORMATS[name]
    values, left = operand(form, x, dim - 2, _LOW, draw, amax)
    if left is None or not left.dim():
        return values, left
    blocks = form.split(values.float(), dim) * form.spread(left, dim)
    return form.join(blocks, dim), None


def _simulated(a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
    """``a @ b`` in bf16, by a product that accumulates in fp32."""
    (left, left_scale), (right, right_scale) = a, b
    scales = [scale for scale in (left_scale, right_scale) if scale is not None]
    if left.dtype == right.dtype == _LOW:
        if not scales:
            return left @ right if bias is None else torch.addmm(bias, left, right)
        wide = (left @ right).float()
    else:
        with torch.autocast(left.device.type, enabled=False):  # it would cast them to bf16
            wide = left.float() @ right.float()
    for scale in scales:
        wide *= scale
    return (wide if bias is None else wide + bias).to(_LOW)


def _draw(scheme: Scheme, layer: LowBitLinear, product: str) -> Draw | None:
    """Which random bits round a gradient, where the scheme rounds stochastically."""
    if not scheme.stochastic:
        return None
    return layer.clock.draw(layer.stream ^ PRODUCTS.index(product))


def _whole_blocks(scheme: Scheme, x_NF: Tensor) -> Tensor:
    """``x`` with tokens of zeros up to a whole number of blocks; they add nothing to a product."""
    missing = -len(x_NF) % scheme.block
    return F.pad(x_NF, (0, 0, 0, missing)) if missing else x_NF


def mixed(x_NF: Tensor) -> Tensor:
    """``x`` with each 16 tokens multiplied by the random Hadamard matrix, rounded to bf16."""
    blocks = x_NF.reshape(-1, HADAMARD, x_NF.shape[1])
    return (hadamard().to(x_NF.device) @ blocks).reshape(x_NF.shape)


@cache
def hadamard() -> Tensor:
    """The orthogonal matrix (16, 16) of +-1/4 whose columns change sign by fixed random bits.

    **Source:** Sylvester's construction; arXiv 2509.25149, appendix C.4.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < HADAMARD:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix * torch.tensor(_SIGNS) / math.sqrt(HADAMARD)).to(_LOW)
