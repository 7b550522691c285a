"""Linear layers that multiply below 16 bits, as a policy's recipe says.

Each tensor is rounded once for both matmuls that take it, to blocks along the dim that each of them
sums over; where one scale holds for the whole tensor, both have the same codes. What the backward
needs is kept as it was rounded: one byte a number on tensor cores. Where the device has such a
matmul, it multiplies the codes (``native.py``). Elsewhere it is simulated: the rounded numbers are
bf16 numbers too, so the matmul itself runs on the native bf16 kernel, with its fp32 accumulation. A
scale of a whole tensor multiplies its result, which is rounded to bf16 before and after: one
rounding more than a tensor core's. Scales of blocks that are fp32 numbers (``fp8-block``) go into
fp32 operands of an fp32 matmul.

The rounding is plain torch. A graph of torch.compile takes it in; outside of one it is compiled by
itself on CUDA, since as single operations it takes longer than bf16's matmul. An autograd.Function
is traced with the layer, so that its passes fuse with what is around them, which an operator of
torch.library would not; AOTAutogradCache, in turn, keeps no graph that has one.

Shapes: N tokens, K input features, O output features.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS, FP32
from halfstep.precision.casting.autocast import active_autocast
from halfstep.precision.casting.cast import Clock, Region, draw
from halfstep.precision.low_bit.native import laid, scaled_matmul, why_not_native
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.rounding import bits_of
from halfstep.precision.policy.recipe import OPERANDS, PRODUCTS, SCHEMES, Recipe
from halfstep.precision.policy.rules import Placement, plain_name

_LOW = torch.bfloat16
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_COMPILES = importlib.util.find_spec("triton") is not None


class Operand(NamedTuple):
    """A matrix as a matmul takes it, the dim that is summed over last."""

    numbers: Tensor  # bf16, or fp32 where blocks have fp32 scales; codes for tensor cores
    scales: Tensor | None  # of codes, as tensor cores read them; None: there are no codes
    outer: Tensor | None  # fp32, 0-dim: what the result is multiplied by


USES = {
    "inputs": (("fprop", 1), ("wgrad", 0)),
    "weights": (("fprop", 1), ("dgrad", 0)),
    "gradients": (("dgrad", 1), ("wgrad", 0)),
}
"""The matmuls that take each tensor, and which of its dims they sum over."""


class LowBitLinear(Region):
    """The forward of a linear layer whose matmuls a recipe rounds below 16 bits."""

    def __init__(self, placement: Placement, clock: Clock) -> None:
        super().__init__(placement.module)
        self.recipe, self.clock = placement.recipe, clock
        self.name, schemes = placement.name, placement.recipe.schemes()
        self.stream = zlib.crc32(plain_name(placement.name).encode())
        self.by_rows = type(placement.module).forward is nn.Linear.forward
        # asked once, as a graph of torch.compile cannot ask a device
        device: Any = placement.module.weight.device
        self.native = frozenset(s.name for s in schemes if not why_not_native(s.name, device))
        self.group = max((s.group for s in schemes if s.name in self.native), default=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, in plain bf16 or fp32 where no matmul is below that now."""
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
        weight_OK = weight if self.by_rows else weight.t()
        if x.dtype not in _INPUTS or not x.dim() or x.shape[-1] != weight_OK.shape[1]:
            return self.inside(args, kwargs)  # torch says what is wrong with it
        x_NK = x.reshape(-1, x.shape[-1])
        count, missing = x_NK.shape[0], -x_NK.shape[0] % self.group
        if missing:  # zeros fill the last group, and add nothing to a sum over tokens
            x_NK = F.pad(x_NK, (0, 0, 0, missing))
        bias = None if bias is None else bias.to(_LOW)
        needs = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
        y_NO = _Products.apply(x_NK, weight_OK, bias, self, *needs)  # type: ignore[no-untyped-call]
        y_NO = y_NO[:count] if missing else y_NO
        return y_NO.view(*x.shape[:-1], y_NO.shape[-1])

    def is_low(self, weight: Tensor) -> bool:
        """Whether the layer multiplies below 16 bits here, where the recipe does.

        It is plain in the context of a policy without a recipe: a policy is applied as it is.
        """
        active = active_autocast()
        if active is not None and not active.policy.recipes():
            return False
        return weight.dtype == _LOW or torch.is_autocast_enabled(weight.device.type)

    def rounded(self, what: str, x: Tensor, *wanted: bool) -> list[Operand]:
        """A tensor as operand of the matmuls that take it, where wanted; trace() knows it."""
        bits = [self._drawn(product, x) if yes and what == "gradients" else None
                for (product, _), yes in zip(USES[what], wanted, strict=True)]  # fmt: skip
        alone = x.device.type == "cuda" and not torch.compiler.is_compiling() and _COMPILES
        make = compiled(what) if alone else operands
        with torch._C.DisableTorchFunction():  # no mode needs to see how an operand is made
            return make(what, x, self.recipe, self.native, wanted, bits)

    def _drawn(self, product: str, x: Tensor) -> Tensor | None:
        """The random bits by which a gradient is rounded for a matmul, if it is."""
        scheme = SCHEMES.get(getattr(self.recipe, product))
        if scheme is None or not scheme.stochastic:
            return None
        key = draw(x, self.clock.number, self.stream ^ PRODUCTS.index(product))
        rows = len(x) + (-len(x) % scheme.block if product == "wgrad" else 0)
        numbers = torch.arange(rows * x.shape[1], device=x.device)
        return bits_of(numbers, key).reshape(rows, x.shape[1])


class _Products(torch.autograd.Function):
    """The three matmuls of a linear layer; see :mod:`halfstep.precision.policy.recipe`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NK: Tensor,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        layer: LowBitLinear,
        needs_dx: bool,
        needs_dw: bool,
    ) -> Tensor:
        x, for_dw = layer.rounded("inputs", x_NK, True, needs_dw)
        weight, for_dx = layer.rounded("weights", weight_OK, True, needs_dx)
        ctx.save_for_backward(*for_dw, *for_dx)
        ctx.layer, ctx.dtypes = layer, (x_NK.dtype, weight_OK.dtype)
        ctx.needs = needs_dx, needs_dw, bias_O is not None
        return run_product(layer, "fprop", x, weight, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, saved = ctx.layer, ctx.saved_tensors
        dx = dw = db = None
        needs_dx, needs_dw, biased = ctx.needs
        for_dx, for_dw = layer.rounded("gradients", grad, needs_dx, needs_dw)
        if needs_dx:
            dx = run_product(layer, "dgrad", for_dx, Operand(*saved[3:])).to(ctx.dtypes[0])
        if needs_dw:
            dw = run_product(layer, "wgrad", for_dw, Operand(*saved[:3]), dtype=ctx.dtypes[1])
        if biased and ctx.needs_input_grad[2]:
            db = grad.to(_LOW).sum(0, dtype=torch.float32).to(_LOW)
        return dx, dw, db, None, None, None


_NOTHING: Any = (None, None, None)  # the operand of a matmul that is not run


def operands(
    what: str,
    x: Tensor,
    recipe: Recipe,
    native: frozenset[str],
    wanted: Sequence[bool],
    bits: Sequence[Tensor | None],
) -> list[Operand]:
    """A matrix as the operand of both its matmuls, in what the recipe says for each."""
    x, before = in_bf16(x), None
    made: list[Operand] = []
    for (product, dim), yes, drawn in zip(USES[what], wanted, bits, strict=True):
        scheme = SCHEMES.get(getattr(recipe, product)) if yes else None
        if scheme is None:
            made.append(Operand(x if dim else x.t(), None, None) if yes else _NOTHING)
            continue
        form, on_cores = BLOCK_FORMATS[getattr(scheme, what)], scheme.name in native
        if form.block is None and before == (form, on_cores):
            codes, scales, outer = made[0]
            made.append(Operand(codes.t().contiguous() if on_cores else codes.t(), scales, outer))
            continue
        y = x
        if product == "wgrad":
            # tokens that fill the last block are zeros, which add nothing to the product
            missing = -x.shape[0] % scheme.block
            y = F.pad(y, (0, 0, 0, missing)) if missing else y
            y = mixed(y) if scheme.hadamard else y
        drawn = drawn if dim or drawn is None else drawn.t()
        q = form.quantize(y if dim else y.t(), 1, bits=drawn)
        if on_cores:
            made.append(Operand(*laid(q), q.outer))
        else:
            values, outer = q.operand()
            exact = form.scale is not FP32 or form.block is None
            made.append(Operand(values.to(_LOW) if exact else values, None, outer))
        before = form, on_cores
    return made


def in_bf16(x: Tensor) -> Tensor:
    """The tensor rounded to bf16; compiled code would leave out a cast that is followed by another.

    So the rounding is done there on the bits of fp32: to nearest, ties to even.
    """
    if x.dtype == _LOW or not torch.compiler.is_compiling():
        return x.to(_LOW)
    bits = x.float().view(torch.int32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
    return torch.where(x.isnan(), x, rounded.view(torch.float32)).to(_LOW)


@cache
def compiled(what: str) -> Callable[..., list[Operand]]:
    """:func:`operands`, compiled for the shapes that come; each kind of tensor has eight."""
    # torch counts what it compiles by the code object, and takes the plain one beyond eight
    own = FunctionType(operands.__code__.replace(), operands.__globals__)
    return torch.compile(own, dynamic=False)


def run_product(
    layer: LowBitLinear,
    product: str,
    a: Operand,
    b: Operand,
    bias_O: Tensor | None = None,
    dtype: torch.dtype = _LOW,
) -> Tensor:
    """One matmul of a layer, in bf16 unless tensor cores write ``dtype``; trace() knows it."""
    scheme = SCHEMES.get(getattr(layer.recipe, product))
    with torch._C.DisableTorchFunction():  # its operands have the dtype that they are to have
        if scheme is not None and scheme.name in layer.native:
            forms = [BLOCK_FORMATS[getattr(scheme, kind)] for kind in OPERANDS[product]]
            made: Tensor = scaled_matmul(a, b, forms, bias_O, dtype, fast=product == "fprop")
        else:
            made = bf16_matmul(a, b, bias_O)
    # compiled by torch 2.11, a forward whose result has a second name has no gradient
    return made if made.dtype == dtype else made.to(dtype)


def bf16_matmul(a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
    """``a @ b.t()`` in bf16, of operands that are not codes."""
    (left, _, left_scale), (right, _, right_scale) = a, b
    if left.dtype == right.dtype == _LOW:
        if left_scale is None and right_scale is None:
            return left @ right.t() if bias is None else torch.addmm(bias, left, right.t())
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
    """
    blocks, features = x_NF.shape[0] // TOKENS, x_NF.shape[1]
    y = x_NF.reshape(blocks, TOKENS, features).float() * SIGNS.to(x_NF.device)[:, None]
    for apart in (1, 2, 4, 8):
        a, b = y.reshape(blocks, TOKENS // 2 // apart, 2, apart, features).unbind(2)
        y = torch.stack((a + b, a - b), 2)
    return in_bf16(y).reshape(x_NF.shape)
