"""Activations, norms and the cross-entropy against their definitions in fp64."""

import ctypes
import math

import pytest
import torch
import torch.nn.functional as F

from halfstep.kernels.forward import address, library
from halfstep.kernels.rows import activation, cross_entropy

DEFINITIONS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def every_finite_bf16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    return x[x.isfinite()]


def last_places(found, true):
    """The distance in units of bf16's last place at the true value, of 2^-19 at the least."""
    size = true.abs().clamp_min(2.0**-19)
    unit = torch.exp2(torch.floor(torch.log2(size)) - 7)
    return (found.double() - true).abs() / unit


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_every_bf16_number_and_its_gradient(kind):
    x = every_finite_bf16()
    far = x.double().clamp(-700, 1e4).requires_grad_()  # x^3 and exp stay finite
    true = DEFINITIONS[kind](far)
    (slope,) = torch.autograd.grad(true.sum(), far)
    true = torch.where(x.double() > 1e4, x.double(), true.detach())
    leaf = x.clone().requires_grad_()
    found = activation(leaf, kind)
    (grad,) = torch.autograd.grad(found, leaf, torch.ones_like(found))
    # half a unit is the rounding to bf16; what the fp32 inside adds is below a twentieth
    assert float(last_places(found.detach(), true).max()) < 0.55
    assert float(last_places(grad, slope).max()) < 0.55


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_numbers_that_are_not_finite(kind):
    x = torch.tensor([math.nan, math.inf, -math.inf] * 6, dtype=torch.bfloat16, requires_grad=True)
    y = activation(x, kind)
    assert y[0::3].isnan().all()
    assert y[1::3].eq(math.inf).all()
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, math.nan))
    assert grad.isnan().all()


@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (17,), (3, 5, 7), (4, 4097), (0, 3)])
def test_activations_of_any_shape_and_layout(shape):
    x = torch.randn(shape).to(torch.bfloat16)
    whole = activation(x, "silu")
    assert whole.shape == x.shape
    one_by_one = [activation(v.reshape(1), "silu") for v in x.flatten()]
    if one_by_one:
        assert torch.equal(whole.flatten(), torch.cat(one_by_one))
    turned = x.transpose(0, -1)
    assert torch.equal(activation(turned, "silu"), whole.transpose(0, -1))


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_second_derivative_is_torchs(kind):
    x = torch.linspace(-3, 3, 40, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(activation(x, kind).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().sum(), x)
    exact = x.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(DEFINITIONS[kind](exact).sum(), exact, create_graph=True)
    (true,) = torch.autograd.grad(grad.sum(), exact)
    assert float((second.double() - true).abs().max()) < 0.02  # bf16 operations of size 1


# --- cross-entropy --------------------------------------------------------------------------------


def loss_by_definition(logits, targets, ignored):
    """In fp64, row by row."""
    found = torch.zeros(len(logits), dtype=torch.float64)
    for row, target in enumerate(targets.tolist()):
        if target != ignored:
            found[row] = torch.logsumexp(logits[row], 0) - logits[row, target]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (5, 2), (7, 15), (9, 16), (4, 17), (64, 999)]
)
def test_losses_and_gradients(rows, columns, dtype):
    torch.manual_seed(rows)
    logits = (torch.randn(rows, columns) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, columns, (rows,))
    ignored = rows // 2 if rows > 1 else []
    targets[ignored] = -100
    exact = logits.detach().double().requires_grad_()
    true = loss_by_definition(exact, targets, -100)
    scale = torch.rand(rows)
    (expected,) = torch.autograd.grad((true * scale).sum(), exact)
    found = cross_entropy(logits, targets, -100)
    assert found.dtype == torch.float32
    # the sum of exponentials, their exponents (|x| < 40, times 2^-24) and the logarithm, in fp32
    torch.testing.assert_close(found.double(), true, rtol=2**-20, atol=2**-18)
    (grad,) = torch.autograd.grad(found, logits, scale)
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-18  # roundings of the result; of exponents
    torch.testing.assert_close(grad.double(), expected, rtol=unit, atol=2**-24)
    assert not grad[ignored].any()


def test_a_sure_model_keeps_its_small_gradients():
    """p - 1 of a p near 1 is an expm1, not a difference of rounded numbers."""
    logits = torch.zeros(1, 100, dtype=torch.bfloat16)
    logits[0, 3] = 12
    logits.requires_grad_()
    targets = torch.tensor([3])
    (grad,) = torch.autograd.grad(cross_entropy(logits, targets, -100).sum(), logits)
    true = -99 / (math.exp(12) + 99)  # -6e-4, of which fp32 sums at 1 know 2^-13 parts
    assert abs(float(grad[0, 3]) / true - 1) < 2**-8  # the rounding to bf16 is half of it


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_shows_in_its_row(number):
    logits = torch.randn(3, 40, dtype=torch.bfloat16)
    logits[1, 5] = number
    loss = cross_entropy(logits, torch.tensor([0, 1, 2]), -100)
    assert loss.isfinite().tolist() == [True, False, True]


def test_masked_logits_are_impossible_not_errors():
    logits = torch.randn(2, 40)
    logits[:, 20:] = -math.inf
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([3, 4]), -100)
    assert torch.allclose(loss, F.cross_entropy(logits, torch.tensor([3, 4]), reduction="none"))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not grad[:, 20:].any()


# --- norms ----------------------------------------------------------------------------------------


def norm(x, gain, bias, epsilon, out_dtype, *, centred):
    """The kernel's output and what its backward needs."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=out_dtype)
    mean = torch.empty(rows) if centred else None
    inverse = torch.empty(rows)
    library().halfstep_norm(
        address(x), x.dtype == torch.bfloat16, address(gain), address(bias), epsilon,
        address(out), out_dtype == torch.bfloat16, address(mean), address(inverse),
        rows, columns, 2,
    )  # fmt: skip
    return out, mean, inverse


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 16, 37, 384])
def test_norms_and_their_gradients(columns, dtype, out, centred):
    torch.manual_seed(columns)
    x = (torch.randn(50, columns) * 3 + 1).to(dtype)
    gain, bias = torch.randn(columns), torch.randn(columns)
    grad = torch.randn(50, columns).to(out)
    leaves = [v.double().requires_grad_() for v in (x, gain, bias)]
    centre = leaves[0].mean(1, keepdim=True) if centred else 0
    spread = ((leaves[0] - centre) ** 2).mean(1, keepdim=True)
    true = (leaves[0] - centre) / torch.sqrt(spread + 1e-3) * leaves[1] + leaves[2]
    expected = torch.autograd.grad(true, leaves, grad.double())
    found, mean, inverse = norm(x, gain, bias, 1e-3, out, centred=centred)
    grad_x, sums = torch.empty_like(x), torch.zeros(2, 2, columns)
    library().halfstep_norm_backward(
        address(x), dtype == torch.bfloat16, address(gain), address(grad), out == torch.bfloat16,
        address(mean), address(inverse), address(grad_x), address(sums), 50, columns, 2,
    )  # fmt: skip
    assert ctypes.sizeof(ctypes.c_float) == 4
    fine = 2**-18  # a few fp32 roundings of numbers of size 16
    places = {torch.bfloat16: 2**-8, torch.float32: fine}
    torch.testing.assert_close(found.double(), true.detach(), rtol=places[out], atol=fine)
    torch.testing.assert_close(grad_x.double(), expected[0], rtol=places[dtype], atol=32 * fine)
    total = sums.sum(0).double()
    torch.testing.assert_close(total[0], expected[1], rtol=fine, atol=32 * fine)
    torch.testing.assert_close(total[1], expected[2], rtol=fine, atol=32 * fine)
