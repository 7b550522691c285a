"""GELU, norms and the cross-entropy against their definitions in fp64."""

import itertools
import math

import pytest
import torch

from every import every
from halfstep.kernels.rows import cross_entropy, dropout, gelu_tanh, norm


def gelu_by_definition(x):
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def every_finite_bf16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    return x[x.isfinite()]


def last_places(found, true):
    """The distance in units of bf16's last place at the true value, of 2^-19 at the least."""
    size = true.abs().clamp_min(2.0**-19)
    unit = torch.exp2(torch.floor(torch.log2(size)) - 7)
    return (found.double() - true).abs() / unit


def test_every_bf16_number_and_its_gradient():
    x = every_finite_bf16()
    far = x.double().clamp(-700, 1e4).requires_grad_()  # x^3 and exp stay finite
    true = gelu_by_definition(far)
    (slope,) = torch.autograd.grad(true.sum(), far)
    true = torch.where(x.double() > 1e4, x.double(), true.detach())
    leaf = x.clone().requires_grad_()
    found = gelu_tanh(leaf)
    (grad,) = torch.autograd.grad(found, leaf, torch.ones_like(found))
    # half a unit is the rounding to bf16; what the fp32 inside adds is below a twentieth
    assert float(last_places(found.detach(), true).max()) < 0.55
    assert float(last_places(grad, slope).max()) < 0.55


def test_numbers_that_are_not_finite():
    x = torch.tensor([math.nan, math.inf, -math.inf] * 6, dtype=torch.bfloat16, requires_grad=True)
    y = gelu_tanh(x)
    assert y[0::3].isnan().all()
    assert y[1::3].eq(math.inf).all()
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, math.nan))
    assert grad.isnan().all()


def test_gelu_of_any_shape_and_layout():
    shapes = [(1,), (15,), (16,), (17,), (3, 5, 7), (4, 4097), (0, 3)]
    every(((shape,) for shape in shapes), gelu_is_that_of_single_numbers)


def gelu_is_that_of_single_numbers(shape):
    x = torch.randn(shape).to(torch.bfloat16)
    whole = gelu_tanh(x)
    assert whole.shape == x.shape
    one_by_one = [gelu_tanh(v.reshape(1)) for v in x.flatten()]
    if one_by_one:
        assert torch.equal(whole.flatten(), torch.cat(one_by_one))
    turned = x.transpose(0, -1)
    assert torch.equal(gelu_tanh(turned), whole.transpose(0, -1))


def test_a_second_derivative_is_torchs():
    x = torch.linspace(-3, 3, 40, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(gelu_tanh(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().sum(), x)
    exact = x.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(gelu_by_definition(exact).sum(), exact, create_graph=True)
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


DTYPES = (torch.bfloat16, torch.float32)


def test_losses_and_gradients():
    sizes = [(1, 1), (5, 2), (7, 15), (9, 16), (4, 17), (64, 999)]
    every(((*size, dtype) for size in sizes for dtype in DTYPES), losses_and_gradients)


def losses_and_gradients(rows, columns, dtype):
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


# --- norms ----------------------------------------------------------------------------------------


def norm_by_definition(x, gain, bias, *, centred):
    centre = x.mean(-1, keepdim=True) if centred else 0
    spread = ((x - centre) ** 2).mean(-1, keepdim=True)
    return (x - centre) / torch.sqrt(spread + 1e-3) * gain + bias


def test_norms_and_their_gradients():
    cases = itertools.product((1, 16, 37, 384), DTYPES, DTYPES, (True, False))
    every(cases, norm_and_its_gradients)


def norm_and_its_gradients(columns, dtype, out, centred):
    torch.manual_seed(columns)
    x = (torch.randn(5, 10, columns) * 3 + 1).to(dtype).requires_grad_()
    gain, bias = (torch.randn(columns).requires_grad_() for _ in range(2))
    grad = torch.randn(5, 10, columns).to(out)
    leaves = [v.detach().double().requires_grad_() for v in (x, gain, bias)]
    true = norm_by_definition(*leaves, centred=centred)
    expected = torch.autograd.grad(true, leaves, grad.double())
    found = norm(x, gain, bias, 1e-3, out, centred=centred)
    assert found.dtype == out
    grads = torch.autograd.grad(found, (x, gain, bias), grad)
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]
    fine = 2**-18  # a few fp32 roundings of numbers of size 16
    places = {torch.bfloat16: 2**-8, torch.float32: fine}
    torch.testing.assert_close(found.double(), true.detach(), rtol=places[out], atol=fine)
    torch.testing.assert_close(grads[0].double(), expected[0], rtol=places[dtype], atol=32 * fine)
    for got, want in zip(grads[1:], expected[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=fine, atol=32 * fine)


@pytest.mark.parametrize("centred", [True, False])
def test_a_norm_without_gain_and_its_second_derivative(centred):
    x = torch.randn(4, 20, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    true = norm_by_definition(exact, 1, 0, centred=centred)
    found = norm(x, None, None, 1e-3, torch.float32, centred=centred)
    for order in range(3):
        # some tens of fp32 roundings of terms that cancel, each up to the largest result
        bound = 2**-18 * max(1.0, float(true.detach().abs().max()))
        assert float((found.double() - true).detach().abs().max()) < bound, order
        (found,) = torch.autograd.grad((found**3).sum(), x, create_graph=True)
        (true,) = torch.autograd.grad((true**3).sum(), exact, create_graph=True)


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_keeps_its_share_scaled_and_backward_keeps_the_same():
    every(itertools.product((0.1, 0.5, 0.9), DTYPES), dropout_keeps_its_share)


def dropout_keeps_its_share(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(2**18 + 5, dtype=dtype, requires_grad=True)
    y = dropout(x, p)
    kept = y != 0
    assert set(y.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p)).to(dtype))}
    # six deviations of a binomial share
    assert abs(float(kept.float().mean()) - (1 - p)) < 6 * math.sqrt(p * (1 - p) / 2**18)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert torch.equal(grad, y)
    for lag in (1, 16, 4096):  # neighbours in a vector, between vectors, between chunks
        both = float((kept[lag:] & kept[:-lag]).float().mean())
        assert abs(both - (1 - p) ** 2) < 0.01


def test_dropout_follows_torchs_seed_and_layout():
    x = torch.randn(64, 300)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(dropout(x.t().contiguous().t(), 0.5), first)
