"""8-bit moments whose spread is too large for 8 bits go over to bf16 by themselves, and say so."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.optim import state as fallback
from halfstep.optim.moments import decode, encode
from halfstep.optim.optimizers import AdamW
from halfstep.optim.state import FELL_BACK, Batch, StepTask
from halfstep.precision.masters.rounding import random_bits
from optim.oracles import fallen_back
from reference.training import through_a_file

N = 512
TINY = np.arange(N) % 8 == 0  # in every block of 128 one element in eight has tiny gradients


def gradient(step: int, spread: float, n: int = N) -> torch.Tensor:
    """Normal numbers with a drift; every eighth divided by ``spread``."""
    g = torch.randn(n, generator=torch.Generator().manual_seed(step)) + 0.5
    return torch.where(torch.arange(n) % 8 == 0, g / spread, g)


def train(moments: str, spread: float, steps: int, **options):
    p = nn.Parameter(torch.zeros(N))
    optimizer = AdamW([("w", p)], lr=1e-3, weight_decay=0.0, eps=1e-30, moments=moments, **options)
    for step in range(1, steps + 1):
        p.grad = gradient(step, spread)
        optimizer.step()
    return p, optimizer


# --- what it is for -----------------------------------------------------------------------------


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("spread", [1e6, 1e8, 1e12])
def test_coordinates_with_tiny_gradients_travel_as_with_fp32_moments(spread):
    """Without the fall-back they travel 12 to 100 times less within these steps."""
    reference, _ = train("fp32", spread, 200)
    with pytest.warns(UserWarning, match=r"moments of w \(64 of 512 elements\) spread .*step 8 on"):
        p, optimizer = train("8bit", spread, 200)
    assert fallen_back(optimizer) == ("w",)
    travelled, wanted = p.detach().abs().numpy(), reference.detach().abs().numpy()
    # The first 8 of 200 steps were taken with the floor, and are Adam's largest; bf16 scatters.
    assert abs(travelled[TINY].sum() / wanted[TINY].sum() - 1) < 0.08
    assert abs(travelled[~TINY].sum() / wanted[~TINY].sum() - 1) < 0.02


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_ordinary_gradients_stay_in_8_bits(betas):
    n = 70_000
    p = nn.Parameter(torch.zeros(n))
    optimizer = AdamW([p], betas=betas, moments="8bit")
    for step in range(65):
        p.grad = torch.randn(n, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert fallen_back(optimizer) == ()
    assert "exp_avg_codes" in optimizer.state[p]


# --- when -----------------------------------------------------------------------------------------


def task(count: int, seed: int, broken: bool = False) -> StepTask:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-45, 3, (count,), generator=generator)
    values = torch.ldexp(torch.rand(count, generator=generator) + 0.5, exponents)
    if broken:
        values[130] = math.nan
    bits = random_bits(seed, 1, count)
    encoded = [encode(values.clone(), "8bit", bits, signed=signed) for signed in (True, False)]
    g = torch.randn(count, generator=generator)
    g[::3] = 0.0
    codes, tops = zip(*encoded, strict=True)
    return StepTask(torch.zeros(count), None, codes, tops, g.to(torch.bfloat16), 0)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000, 5000])
def test_elements_below_are_those_at_the_floor_that_have_a_gradient(monkeypatch, count, broken):
    """The floor from the format's text: 2^-32 of twice the top's power of two, and two steps up."""
    if broken and count < 131:
        pytest.skip("there is no element to break")
    monkeypatch.setattr(fallback, "_CHECKED", 512)
    t = task(count, count, broken)
    v = decode(t.moments[1], t.tops[1], signed=False).double().numpy()
    tops = np.repeat(t.tops[1].numpy().astype(np.int64), 128)[:count]
    floor = 2.0 ** (tops - 127 + 1 - 32) * (1 + 2 / 8)
    with np.errstate(invalid="ignore"):
        below = (v == floor) & (t.gradient.float().numpy() != 0)
    assert fallback.elements_below(Batch([t, t])).tolist() == [below.sum()] * 2
    if count > 1000:
        assert below.sum() > 100
    m, wide = fallback.wide_moments(t, -0.5, 0.25)
    assert m.dtype == wide.dtype == torch.bfloat16
    held = decode(t.moments[0], t.tops[0], signed=True)
    assert torch.equal(m.float().nan_to_num(7.0), held.nan_to_num(7.0))
    keeps = ~below & ~np.isnan(v)
    assert np.array_equal(wide.double().numpy()[keeps], v[keeps])
    anew = np.minimum(0.25 * (0.5 * t.gradient.double().numpy()[below]) ** 2, floor[below])
    assert (np.abs(wide.double().numpy()[below] - anew) <= anew * 2.0**-8).all()
    assert np.isnan(wide.double().numpy()[np.isnan(v)]).all()


# --- determinism, saving, ranks -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the second moments")
@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_a_resumed_run_goes_on_to_the_bit_and_says_nothing_anew(how):
    p, optimizer = train("8bit", 1e7, 70, update="split")
    if how == "deepcopy":
        other = copy.deepcopy(optimizer)
        q = other.param_groups[0]["params"][0]
    else:
        q = nn.Parameter(p.detach().clone())
        other = AdamW([("w", q)], moments="8bit")
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert fallen_back(other) == ("w",)
    assert optimizer.state[p][FELL_BACK] == 8
    for step in range(71, 100):
        p.grad, q.grad = gradient(step, 1e7), gradient(step, 1e7)
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.step()
    assert torch.equal(p, q)
    for key, value in optimizer.state[p].items():
        assert torch.equal(value, other.state[q][key]), key


@pytest.mark.parametrize("elements", [512, 0])
def test_ranks_may_agree(elements):
    """A rank whose own part would stay in 8 bits, be it empty, follows the others."""
    p, q = nn.Parameter(torch.zeros(elements)), nn.Parameter(torch.zeros(9))
    optimizer = AdamW([p, q], moments="8bit")
    asked = []

    def agree(falls: list[bool]) -> list[bool]:
        asked.append(falls)
        return [True, False]

    optimizer.agree_on_fallback = agree
    p.grad, q.grad = torch.ones(elements), torch.ones(9)
    for _ in range(7):
        optimizer.step()
    with pytest.warns(UserWarning, match=f"0 of {elements}"):
        optimizer.step()
    assert asked == [[False, False]]
    assert fallen_back(optimizer) == (f"parameter 0 of shape ({elements},)",)
    held = optimizer.state[p]["exp_avg_sq"].clone()
    optimizer.step()  # it goes on in bf16
    assert elements == 0 or not torch.equal(held, optimizer.state[p]["exp_avg_sq"])
    assert "exp_avg_codes" in optimizer.state[q]
