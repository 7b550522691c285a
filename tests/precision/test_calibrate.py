"""The calibrated start: the largest finite scale against every scale tried, and no side effects."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import PrecisionError, simulated_fp16
from halfstep.precision.scaling.calibrate import graph_leaves, largest_finite_scale


def by_trying(make_loss, leaves, low, high):
    """The definition: every power of two from the top, each with a graph of its own."""
    for exponent in range(high, low - 1, -1):
        gradients = torch.autograd.grad(make_loss() * 2.0**exponent, leaves, allow_unused=True)
        if all(g.isfinite().all() for g in gradients if g is not None):
            return 2.0**exponent
    return 2.0**low


def half(weight, factor):
    """Gradient factor * scale in fp16, finite below 65520."""
    return (weight.half() * factor).sum().float()


@pytest.mark.parametrize("exponent", range(-26, 12))
def test_every_exponent_is_found(exponent):
    weight = torch.ones(3, requires_grad=True)
    loss = half(weight, 1.0) * 2.0**exponent
    # the gradient is 2^exponent * S, the largest finite power of two in fp16 is 2^15
    expected = 2.0 ** min(24, max(0, 15 - exponent))
    assert largest_finite_scale(loss) == expected


@pytest.mark.parametrize("seed", range(6))
def test_a_network_agrees_with_trying_them_all(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).half()
    x = torch.randn(5, 8).half()
    model[0].bias.requires_grad_(False)
    leaves = [p for p in model.parameters() if p.requires_grad]

    def make_loss():
        return model(x).float().square().sum() * 10.0 ** (seed - 1)

    expected = by_trying(make_loss, leaves, 0, 24)
    assert 1.0 < expected < 2.0**24
    assert largest_finite_scale(make_loss()) == expected


@pytest.mark.parametrize("seed", range(3))
def test_simulated_fp16_agrees_with_trying_them_all(seed):
    torch.manual_seed(seed)
    model = nn.Linear(32, 32).half()
    x = torch.randn(64, 32).half()

    def make_loss():
        return model(x).float().square().sum()

    with simulated_fp16():
        expected = by_trying(make_loss, list(model.parameters()), 0, 24)
        assert largest_finite_scale(make_loss()) == expected
    assert 1.0 < expected < 2.0**24


@pytest.mark.parametrize(
    ("minimum", "maximum", "expected"),
    [
        (1.0, 2.0**24, 512.0),
        (1.0, 256.0, 256.0),
        (1.0, 300.0, 256.0),
        (1024.0, 2.0**24, 1024.0),
        (600.0, 2.0**24, 1024.0),
        (300.0, 513.0, 512.0),
        (512.0, 512.0, 512.0),
        (2.0**-20, 0.3, 0.25),
        (3, 8, 8.0),
    ],
)
def test_bounds(minimum, maximum, expected):
    loss = half(torch.ones(2, requires_grad=True), 64.0)
    assert largest_finite_scale(loss, minimum=minimum, maximum=maximum) == expected


def test_the_smallest_scale_is_the_answer_when_none_is_finite():
    weight = torch.zeros(2, requires_grad=True)
    assert largest_finite_scale(weight.sqrt().sum()) == 1.0  # the gradient of sqrt at 0 is inf


def test_one_leaf_of_many_decides():
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert largest_finite_scale(one.sum() + half(two, 4096.0)) == 8.0
    assert largest_finite_scale(half(two, 4096.0) + one.sum()) == 8.0


def test_nothing_is_touched_and_the_graph_can_still_be_used():
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    calls = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    model.weight.grad = torch.full((4, 4), 7.0)
    twin.weight.grad = torch.full((4, 4), 7.0)
    x = torch.randn(3, 4)
    loss, twin_loss = model(x).square().mean(), twin(x).square().mean()
    state = torch.get_rng_state()
    largest_finite_scale(loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == []
    assert torch.equal(model.weight.grad, torch.full((4, 4), 7.0))
    assert model.bias.grad is None
    loss.backward()
    twin_loss.backward()
    assert len(calls) == 2
    assert torch.equal(model.weight.grad, twin.weight.grad)
    assert torch.equal(model.bias.grad, twin.bias.grad)


def test_the_number_of_backward_passes():
    """25 exponents, 2^0 to 2^24: at most ceil(log2(25)) = 5 trials."""
    weight, passes = torch.ones(2, requires_grad=True), []
    hooked = weight * 1
    hooked.register_hook(lambda gradient: passes.append(1))
    largest_finite_scale(half(hooked, 1.0))
    assert len(passes) in (4, 5)


def test_leaves_are_found_once_each_through_any_graph():
    class Ctx(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = x  # no leaf by this name
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    middle = a * b
    loss = (Ctx.apply(middle) + middle.detach() + a).sum()
    assert {id(leaf) for leaf in graph_leaves(loss)} == {id(a), id(b)}
    assert len(graph_leaves(loss)) == 2
    assert graph_leaves(torch.ones(())) == []
    single = torch.ones((), requires_grad=True)
    assert graph_leaves(single)[0] is single
    assert largest_finite_scale(single) == 2.0**24


def test_sparse_gradients_are_looked_at_summed():
    embedding = nn.Embedding(3, 2, sparse=True).half()
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    # one row three times: 3 * 2^13 * S reaches 65520 at S = 4, though 2^13 * 4 does not
    loss = (embedding(torch.tensor([1, 1, 1])).float() * 2.0**13).sum()
    assert largest_finite_scale(loss) == 2.0


def test_checkpointed_models():
    layer, x = nn.Linear(4, 4).half(), torch.ones(2, 4).half().requires_grad_()
    loss = (checkpoint(layer, x, use_reentrant=False).float() * 1024).sum()
    plain = (layer(x).float() * 1024).sum()
    assert largest_finite_scale(loss) == largest_finite_scale(plain) > 1
    loss.backward()
    with pytest.raises(PrecisionError, match="use_reentrant=False"):
        largest_finite_scale(checkpoint(layer, x, use_reentrant=True).float().sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_any_scalar_will_do(dtype, shape):
    loss = half(torch.ones(2, requires_grad=True), 64.0).to(dtype).reshape(shape)
    assert largest_finite_scale(loss) == 512.0


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (torch.ones(2, requires_grad=True), r"shape \(2,\) that requires a gradient"),
        (torch.ones(()), "does not require a gradient; allowed: a scalar"),
        (torch.tensor(math.nan, requires_grad=True), "the loss is nan before any scaling"),
        (torch.ones((), requires_grad=True) * math.inf, "the loss is inf before any scaling"),
    ],
)
def test_a_loss_that_cannot_be_calibrated_is_refused(loss, text):
    with pytest.raises(PrecisionError, match=text):
        largest_finite_scale(loss)


@pytest.mark.parametrize(
    "bounds", [(0.0, 1.0), (-1.0, 1.0), (1.0, math.inf), (math.nan, 2.0), (4.0, 2.0), (5.0, 7.0),
               (1.0, 2.0**127)]
)  # fmt: skip
def test_bounds_without_a_power_of_two_are_refused(bounds):
    with pytest.raises(PrecisionError, match="allowed"):
        largest_finite_scale(
            torch.ones((), requires_grad=True), minimum=bounds[0], maximum=bounds[1]
        )
