"""The bound on two runs of AdamW, against AdamW in fp64 from its definition."""

import numpy as np
import pytest
import torch
from tests.reference.adam import EPS, apart, assert_near, most

BETAS = (0.9, 0.95)


def adam(gradients, rates, eps):
    """Where AdamW without decay takes weights of 0; gradients [steps, weights], fp64."""
    beta1, beta2 = BETAS
    m = v = w = np.zeros(gradients.shape[1])
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return w


@pytest.mark.parametrize("steps", [1, 2, 8, 40])
def test_no_gradients_take_an_update_beyond_the_largest(steps):
    draw = np.random.default_rng(steps)
    rates = [0.0] * (steps - 1) + [1.0]
    shapes = draw.standard_normal((steps, 5000)) * np.exp(3 * draw.standard_normal((steps, 5000)))
    # the gradients that reach it are those of Cauchy and Schwarz: proportional to a / b
    shapes[:, 0] = [(BETAS[0] / BETAS[1]) ** (steps - 1 - t) for t in range(steps)]
    reached = np.abs(adam(shapes, rates, 0.0))
    largest = most(BETAS, steps)
    assert reached[0] == pytest.approx(largest, rel=1e-12)  # fp64, some hundred operations
    assert reached.max() <= largest * (1 + 1e-12)


@pytest.mark.parametrize("eps", [EPS, 1e-4])
@pytest.mark.parametrize("noise", [1e-7, 1e-5])
def test_runs_with_noisy_gradients_stay_within_the_bound_and_come_near_it(eps, noise):
    draw = np.random.default_rng(0)
    rates = [1e-3, 2e-3, 2e-3, 1e-3, 5e-4]
    size = np.exp(draw.uniform(np.log(1e-9), 0, 20_000))  # binades of gradients
    exact = draw.standard_normal((5, 20_000)) * size
    exact[:, :100] = 0  # whose true gradient is 0
    off = draw.uniform(-noise, noise, exact.shape)
    off[:, ::2] = noise * np.sign(off[0, ::2])  # always the same way
    moved = np.abs(adam(exact + off, rates, eps) - adam(exact, rates, eps))
    bound = apart(rates, noise, eps=eps)
    assert moved.max() <= bound
    assert moved.max() > bound / 4  # 1 + largest, of which noise alone reaches 1


def test_a_usual_eps_lets_noise_move_a_weight_by_whole_rates():
    rates = [1e-3] * 8
    noise = np.full((8, 1), 1e-6)
    assert abs(adam(noise, rates, 1e-8)).item() > 0.98 * sum(rates)
    assert apart(rates, 2e-6, eps=1e-8) >= 2 * sum(rates)  # so the bound says nothing there
    assert apart(rates, 2e-6) < 1e-3 * sum(rates)


def test_weights_that_are_further_apart_are_told_by_name():
    wanted = {"a": torch.zeros(3), "b": torch.ones(2)}
    assert_near(wanted, wanted, [1e-3], max_norm=1.0)
    found = {**wanted, "b": torch.tensor([1.0, 1.0 + 1e-5])}
    with pytest.raises(AssertionError, match="'b'"):
        assert_near(found, wanted, [1e-3], max_norm=1.0)
