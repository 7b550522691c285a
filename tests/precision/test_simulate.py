"""16-bit products through fp32 kernels: within the bound of rounding theory, nothing left behind.

Every result is compared with fp64: half a gap for the one rounding, plus the fp32 accumulation of K
terms, ``K * 2^-24 * sum |a b|``. See reference/products.py.
"""

import contextlib
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.precision.casting.autocast import SimulatedProducts
from reference.products import U16, U32, assert_within
from reference.witness import Witness, low_products

HALF, BRAIN = torch.float16, torch.bfloat16
SIMULATED = {low: partial(SimulatedProducts, low) for low in (HALF, BRAIN)}
both_formats = pytest.mark.parametrize("low", SIMULATED, ids=["fp16", "bf16"])
MIXED = [
    *((HALF, other) for other in (BRAIN, torch.float32, torch.float64)),
    *((BRAIN, other) for other in (HALF, torch.float32, torch.float64)),
]
"""A format that is simulated, and another one."""


def half(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """fp16 numbers over several binades."""
    g = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-3, 4, shape, generator=g)
    return (spread * torch.randn(shape, generator=g) * 2.0**exponent).half()


def check(work: Callable[..., Tensor], inputs: list[Tensor], terms: int, what: str) -> None:
    """Forward and all input gradients of sums of products, against fp64.

    Args:
        work: Sums of products of its inputs (and of addends), all in the inputs' dtype.
        inputs: Tensors of the format that is simulated.
        terms: No output or gradient element adds up more terms than this (K).
        what: For messages.
    """

    def run(tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        output = work(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    low = inputs[0].dtype
    upstream = half(*work(*inputs).shape, seed=99).to(low)
    with SIMULATED[low]():
        simulated = run(inputs, upstream)
    exact = run([t.double() for t in inputs], upstream.double())
    # The same sums with every term's magnitude: work is made of sums of products, and so are its
    # derivatives; with non-negative inputs and weights nothing cancels.
    sums = run([t.double().abs() for t in inputs], upstream.double().abs())
    for i, (ours, true, size) in enumerate(zip(simulated, exact, sums, strict=True)):
        assert ours.dtype == low
        assert ours.shape == true.shape
        where = f"{what}, {'output' if i == 0 else f'gradient of input {i - 1}'}"
        assert_within(ours, true, terms * U32 * size, 0.5, where)


# name: work, inputs, terms
PRODUCTS = {
    "mm": (torch.mm, [half(7, 33), half(33, 5, seed=1)], 33),
    "mm transposed": (lambda a, b: torch.mm(a.t(), b.t()), [half(33, 7), half(5, 33, seed=1)], 33),
    "addmm": (torch.addmm, [half(7, 5), half(7, 33, seed=1), half(33, 5, seed=2)], 34),
    "addmm alpha beta": (
        lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=2.0),
        [half(7, 5), half(7, 33, seed=1), half(33, 5, seed=2)],
        34,
    ),
    "bmm": (torch.bmm, [half(3, 4, 20), half(3, 20, 6, seed=1)], 20),
    "baddbmm alpha beta": (
        lambda c, a, b: torch.baddbmm(c, a, b, alpha=2.0, beta=0.25),
        [half(3, 4, 6), half(3, 4, 20, seed=1), half(3, 20, 6, seed=2)],
        21,
    ),
    "mv": (torch.mv, [half(9, 40), half(40, seed=1)], 40),
    "addmv": (torch.addmv, [half(9), half(9, 40, seed=1), half(40, seed=2)], 41),
    "dot": (torch.dot, [half(300), half(300, seed=1)], 300),
    "linear 2-d": (F.linear, [half(6, 24), half(5, 24, seed=1), half(5, seed=2)], 25),
    "linear 3-d": (F.linear, [half(2, 6, 24), half(5, 24, seed=1), half(5, seed=2)], 25),
    "linear without bias": (F.linear, [half(2, 6, 24), half(5, 24, seed=1)], 24),
    "einsum": (
        lambda a, b: torch.einsum("bij,kj->bik", a, b),
        [half(2, 6, 24), half(5, 24, seed=1)],
        24,
    ),
    # 2 images x 6 x 6 places: a weight's gradient adds up 72 terms, a bias's too
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [half(2, 3, 6, 6), half(4, 3, 3, 3, seed=1), half(4, seed=2)],
        72,
    ),
    "conv2d strided, grouped": (
        lambda x, w: F.conv2d(x, w, stride=2, groups=2),
        [half(2, 4, 7, 7), half(6, 2, 3, 3, seed=1)],
        27,
    ),
    "conv1d": (F.conv1d, [half(2, 3, 12), half(4, 3, 5, seed=1)], 20),
    "conv_transpose2d": (F.conv_transpose2d, [half(2, 3, 5, 5), half(3, 2, 3, 3, seed=1)], 50),
}


def inputs_of(name: str, low: torch.dtype) -> list[Tensor]:
    return [t.to(low) for t in PRODUCTS[name][1]]


@both_formats
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_forward_and_backward(name, low):
    work, _, terms = PRODUCTS[name]
    check(work, inputs_of(name, low), terms, name)


@both_formats
@pytest.mark.parametrize("name", PRODUCTS)
def test_no_product_reaches_torch_s_16_bit_kernels(name, low):
    def both() -> None:
        leaves = [t.clone().requires_grad_() for t in inputs_of(name, low)]
        PRODUCTS[name][0](*leaves).sum().backward()

    assert low_products(both, SIMULATED[low]()) == []


FURTHER = {
    "attention": lambda t: F.scaled_dot_product_attention(*[t(1, 2, 5, 8)] * 3),
    "addbmm": lambda t: torch.addbmm(t(3, 4), t(2, 3, 5), t(2, 5, 4)),
    "bilinear": lambda t: F.bilinear(t(2, 3), t(2, 4), t(5, 3, 4)),
    "matmul of 4-d": lambda t: t(2, 3, 4, 5) @ t(5, 6),
    "outer": lambda t: torch.outer(t(3), t(4)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(3, 4), t(4, 5), t(5, 2)]),
    "lstm": lambda t: nn.LSTM(4, 5).to(t(1).dtype)(t(2, 1, 4)),
    "encoder layer": lambda t: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(t(1).dtype).eval()(t(3, 2, 8))
    ),
    "attention layer": lambda t: (
        nn.MultiheadAttention(8, 2, batch_first=True).to(t(1).dtype).eval()(*[t(3, 2, 8)] * 3)
    ),
}


@both_formats
@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_every_other_product_is_simulated_too_as_the_module_says(name, context, low):
    def work(dtype: torch.dtype = low) -> Tensor:
        torch.manual_seed(0)
        result = FURTHER[name](lambda *shape: half(*shape).to(low).to(dtype))
        return result[0] if isinstance(result, tuple) else result

    with context():
        assert low_products(work, SIMULATED[low]()) == []
        with SIMULATED[low]():
            got = work()
        expected = work(torch.float32)
    assert got.dtype == low
    # inputs are the same, a layer's weights and what it passes on are rounded: a dozen roundings
    error = (got.float() - expected).abs().max()
    assert error <= 12 * U16[low] * expected.abs().max()


# --- attention ------------------------------------------------------------------------------------


@both_formats
def test_attention_runs_in_fp32_below_and_keeps_its_log_sum_exp_in_fp32(low):
    q = half(1, 2, 5, 8).to(low)
    causal = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert low_products(causal, SIMULATED[low]()) == []
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with SIMULATED[low]():
        output, log_sum_exp = op(q, q, q)
    assert (output.dtype, log_sum_exp.dtype) == (low, torch.float32)
    # (the operator wants [batch, head, row, width]; log-sum-exp is [batch, head, row])
    expected = (q.double() @ q.double().mT / math.sqrt(8)).logsumexp(-1)
    # fp32: 8 products per score, 5 terms per sum, |score| < 64: 20 roundings of at most 2^-24 * 64
    assert (log_sum_exp.double() - expected).abs().max() <= 20 * U32 * 64


# --- the ends of the range ------------------------------------------------------------------------


def product(a: list[float], b: list[float], low: torch.dtype = HALF) -> Tensor:
    with SIMULATED[low]():
        return torch.tensor([a]).to(low) @ torch.tensor([b]).to(low).T


@pytest.mark.parametrize(
    ("tail", "expected"),
    # 65504 + 15.984375 = 65519.984375 is an fp32 number: it rounds down; 65520 is the tie that
    # rounding to even sends to inf (IEEE 754-2019, 7.4).
    [(15.984375, 65504.0), (16.0, math.inf), (31.0, math.inf), (-32.0, 65472.0)],
)
def test_the_upper_end(tail, expected):
    for sign in (1.0, -1.0):
        assert product([65504.0, tail], [sign, sign]).item() == sign * expected


@both_formats
def test_long_sums_are_accumulated_in_fp32(low):
    # In fp16 accumulation 2048 + 1 stays 2048, in bf16 256; a tensor core's fp32 does not.
    ones = torch.ones(4096, dtype=low)
    with SIMULATED[low]():
        assert (ones @ ones).item() == 4096.0
        assert (ones[None] @ ones[:, None]).item() == 4096.0


# --- what must not be touched ---------------------------------------------------------------------


@both_formats
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_a_nested_tensor_has_the_numbers_of_its_parts(layout, context, low):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).to(low)
    parts = [torch.randn(rows, 6).to(low) for rows in (2, 5)]
    leaves = [p.clone().requires_grad_() for p in parts]
    with SIMULATED[low](), context():
        dense = [layer(leaf) for leaf in leaves]
        nested = layer(torch.nested.as_nested_tensor(leaves, layout=layout)).unbind()
        gradients = []
        for outputs in (dense, nested) if context is not torch.no_grad else ():
            loss = sum(x.float().square().sum() for x in outputs)
            gradients.append(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))
    for one, other in (*zip(dense, nested, strict=True), *zip(*gradients, strict=True)):
        torch.testing.assert_close(one, other, rtol=torch.finfo(low).eps * 2, atol=1e-2)


@pytest.mark.parametrize(("low", "dtype"), [*MIXED, (HALF, torch.int64), (BRAIN, torch.int64)])
def test_other_dtypes_are_untouched(dtype, low):
    a, b = (10 * half(9, 17)).to(dtype), (10 * half(17, 4, seed=1)).to(dtype)
    outside = a @ b
    with Witness() as witness, SIMULATED[low]():
        inside = a @ b
    assert inside.dtype == dtype
    assert torch.equal(inside, outside)
    assert all(dtypes <= {dtype} for _, dtypes in witness.seen)
