"""Linear layers that multiply below 16 bits, as a policy's recipe says.

Each operand is rounded to blocks along the dim that its product sums over. Where the device has
such a product, it multiplies the codes (``native.py``). Elsewhere it is simulated: the rounded
numbers are bf16 numbers too, so the product itself runs on the native bf16 kernel, with its fp32
accumulation. A scale of a whole tensor multiplies its result, which is rounded to bf16 before and
after: one rounding more than a tensor core's. Scales of blocks that are fp32 numbers
(``fp8-block``) go into fp32 operands of an fp32 product.

Shapes: N tokens, K input features, O output features.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS, FP32, BlockFormat
from halfstep.precision.casting.autocast import active_autocast
from halfstep.precision.casting.cast import Clock, Region
from halfstep.precision.low_bit.native import scaled_product, why_not_native
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.rounding import random_bits
from halfstep.precision.policy.recipe import OPERANDS, PRODUCTS, SCHEMES, Recipe
from halfstep.precision.policy.rules import Placement, plain_name

_LOW = torch.bfloat16
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


class LowBitLinear(Region):
    """The forward of a linear layer whose products a recipe rounds below 16 bits."""

    def __init__(self, placement: Placement, clock: Clock) -> None:
        super().__init__(placement.module)
        self.recipe, self.clock = placement.recipe, clock
        self.name, schemes = placement.name, placement.recipe.schemes()
        self.stream = zlib.crc32(plain_name(placement.name).encode())
        self.by_rows = type(placement.module).forward is nn.Linear.forward
        # asked once, as a graph of torch.compile cannot ask a device
        device: Any = placement.module.weight.device
        self.native = frozenset(s.name for s in schemes if not why_not_native(s.name, device))
        # random bits are drawn by Python, and a graph would freeze them
        self.multiply = _outside_graphs if any(s.stochastic for s in schemes) else _Products.apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, in plain bf16 or fp32 where no product is below that now."""
        module: Any = self.module
        weight, bias = module.weight, module.bias
        if not (self.is_low(weight) and self.recipe):
            return self.inside(args, kwargs)
        (x,) = (*args, *kwargs.values())
        nested, wrong = getattr(x, "is_nested", False), ""
        layout = "nested" if nested else getattr(x, "layout", type(x).__name__)
        if is_sharded(weight):
            wrong = f"its weight is distributed over ranks ({tuple(weight.shape)})"
        elif layout != torch.strided:
            wrong = f"takes strided tensors alone, got {layout}"
        if wrong:
            raise PrecisionError(
                f"layer {self.name or 'of the model'} multiplies below 16 bits ({self.recipe}), "
                f"and {wrong}; keep it by keep_bf16={self.name or '*'}"
            )
        weight_OK = weight.to(_LOW) if self.by_rows else weight.to(_LOW).t()
        if x.dtype not in _INPUTS or not x.dim() or x.shape[-1] != weight_OK.shape[1]:
            return self.inside(args, kwargs)  # torch says what is wrong with it
        x_NK = x.to(_LOW).reshape(-1, x.shape[-1])
        bias = None if bias is None else bias.to(_LOW)
        y_NO = self.multiply(x_NK, weight_OK, bias, self)
        return y_NO.view(*x.shape[:-1], y_NO.shape[-1])

    def is_low(self, weight: Tensor) -> bool:
        """Whether the layer multiplies below 16 bits here, where the recipe does.

        It is plain in the context of a policy without a recipe: a policy is applied as it is.
        """
        active = active_autocast()
        if active is not None and not active.policy.recipes():
            return False
        return weight.dtype == _LOW or torch.is_autocast_enabled(weight.device.type)


class _Products(torch.autograd.Function):
    """The three products of a linear layer; see :mod:`halfstep.precision.policy.recipe`."""

    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, layer: LowBitLinear
    ) -> Tensor:
        ctx.save_for_backward(x_NK, weight_OK)
        ctx.layer, ctx.biased = layer, bias_O is not None
        return run_product(layer, layer.recipe, "fprop", x_NK, weight_OK, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_OK = ctx.saved_tensors
        grad_NO, layer = grad.to(_LOW), ctx.layer
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = run_product(layer, layer.recipe, "dgrad", grad_NO, weight_OK)
        if ctx.needs_input_grad[1]:
            dw = run_product(layer, layer.recipe, "wgrad", grad_NO, x_NK)
        if ctx.biased and ctx.needs_input_grad[2]:
            db = grad_NO.sum(0, dtype=torch.float32).to(_LOW)
        return dx, dw, db, None


_outside_graphs = torch.compiler.disable(_Products.apply)  # type: ignore[no-untyped-call]
_SUMMED = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
"""Which dim of its two operands a product sums over."""


def run_product(
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
    left, right = (BLOCK_FORMATS[getattr(scheme, kind)] for kind in OPERANDS[product])
    i, j = _SUMMED[product]
    with torch._C.DisableTorchFunction():  # no mode needs to see how an operand is made
        if product == "wgrad":
            # tokens that fill the last block are zeros, which add nothing to the product
            a, b = (F.pad(x, (0, 0, 0, -len(x) % scheme.block)) for x in (a, b))
            a, b = (mixed(a), mixed(b)) if scheme.hadamard else (a, b)
        bits = None
        if scheme.stochastic and product != "fprop":
            seed, step, stream = layer.clock.draw(layer.stream ^ PRODUCTS.index(product))
            bits = random_bits(seed, step, a.shape, stream=stream, device=a.device)
        if scheme.name in layer.native:
            wide = scaled_product(left.quantize(a, i, bits=bits), right.quantize(b, j))
            return (wide if bias_O is None else wide + bias_O).to(_LOW)
        x, y = operand(left, a, i, bits), operand(right, b, j)
    return _simulated(x, y, bias_O)


Operand = tuple[Tensor, Tensor | None]
"""Numbers in bf16, (M, K), and the scale of all; or in fp32, scaled by blocks."""


def operand(form: BlockFormat, x: Tensor, dim: int, bits: Tensor | None = None) -> Operand:
    """A matrix in a block format along a dim, which then is the last."""
    values, left = form.operand(x, dim, bits=bits)
    if form.scale is FP32 and left is not None and left.ndim:
        values, left = form.times(values, left, dim), None
    else:
        values = values.to(_LOW)
    return (values if dim else values.t()), left


def _simulated(a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
    """``a @ b.t()`` in bf16, by a product that accumulates in fp32."""
    (left, left_scale), (right, right_scale) = a, b
    if left.dtype == right.dtype == _LOW:
        if not left.shape[1] or (left_scale is None and right_scale is None):
            return left @ right.t() if bias is None else torch.addmm(bias, left, right.t())
        with torch._C.DisableTorchFunction():
            wide = (left @ right.t()).float()
    else:
        with torch.autocast(left.device.type, enabled=False):  # it would cast them to bf16
            wide = left.float() @ right.float().t()
    for scale in (left_scale, right_scale):
        wide = wide if scale is None else wide.mul_(scale)
    return (wide if bias is None else wide + bias).to(_LOW)


TOKENS = 16
"""How many tokens are mixed."""

SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], device="cpu") / 4.0
"""fp32, (16,): the sign of each token, times the matrix's norm."""


def mixed(x_NF: Tensor) -> Tensor:
    """Numbers whose tokens are mixed, 16 at a time, by a random Hadamard matrix.

    It spreads outliers over 16 tokens before a weight's gradient. Both operands of the product are
    multiplied by it, and it cancels there, since it is orthogonal::

        y = H S x / 4    S the diagonal matrix of fixed random signs, H Sylvester's matrix of +-1

    The arithmetic is defined here, so that every device and kernel has the same bits: ``x`` times
    +-1/4, four rounds of sums and differences in fp32 (of tokens 1, 2, 4 and 8 apart), and one
    rounding to bf16. Each term of a number goes through four additions, so that before the last
    rounding the number is off by at most 4 u / (1 - 4 u) times the sum of magnitudes, u = 2^-24.

    **Source:** Sylvester's construction; arXiv 2509.25149, appendix C.4, for the 16 tokens;
    TransformerEngine ``nvfp4_tensor.py``, ``get_wgrad_sign_vector``, for the signs; Higham,
    "Accuracy and Stability of Numerical Algorithms", 2nd ed., 4.2, for the bound.

    Args:
        x_NF: bf16, (N tokens, F features); N a multiple of 16.

    Returns:
        bf16, of the same shape.
    """
    blocks, features = x_NF.shape[0] // TOKENS, x_NF.shape[1]
    y = x_NF.reshape(blocks, TOKENS, features).float() * SIGNS.to(x_NF.device)[:, None]
    for apart in (1, 2, 4, 8):
        a, b = y.reshape(blocks, TOKENS // 2 // apart, 2, apart, features).unbind(2)
        y = torch.stack((a + b, a - b), 2)
    return y.to(x_NF.dtype).reshape(x_NF.shape)
