"""What moments of few bits lose: the meter against a brute-force count of all elements."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.diagnostics.lost_updates.meter import LostUpdateMeter
from halfstep.optim.optimizers import SGD, AdamW, Lion

N = 4096


def gradients(step: int, spread: float, share: int = 4) -> torch.Tensor:
    """Normal numbers with a drift; one in ``share`` divided by ``spread``."""
    g = torch.randn(N, generator=torch.Generator().manual_seed(step)) + 0.5
    return torch.where(torch.arange(N) % share == 0, g / spread, g)


def never(falls: list[bool]) -> list[bool]:
    """Ranks that agree that no tensor falls back to bf16."""
    return [False] * len(falls)


def adamw(moments: str, *, falls_back: bool = False, **options):
    p = nn.Parameter(torch.zeros(N))
    options = {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-30, **options}
    optimizer = AdamW([("w", p)], moments=moments, **options)
    if not falls_back:
        optimizer.agree_on_fallback = never
    return p, optimizer


@pytest.mark.parametrize("spread", [1e6, 1e7, 1e8])
def test_elements_that_8_bits_slow_down_are_counted_as_by_brute_force(spread):
    """The reference is a run with fp32 moments: which elements travel less than half as far?"""
    p, optimizer = adamw("8bit")
    q, exact = adamw("fp32")
    meter = LostUpdateMeter(optimizer, every=100)  # 4,096 samples: all elements
    for step in range(100):
        p.grad, q.grad = gradients(step, spread), gradients(step, spread)
        optimizer.step()
        exact.step()
    (report,) = meter.report()
    travelled = (p / q).detach().abs().numpy()
    brute = (travelled < 0.5).mean()
    assert 0.2 < brute <= 0.25  # else the test looks at something else
    assert abs(report.slowed - brute) < 0.01
    # 31 times less per step at the end of 100, 12 over all of them; 3,000 at the largest spread
    assert travelled[::4].mean() < 0.1
    assert report.slowest == pytest.approx(31 * spread / 1e6, rel=0.1)
    assert report.lost < 0.001  # some are so small that fp32 weights lose them as well
    assert report.verdict.startswith("25 % of updates are less than half of what fp32 moments")
    assert "use moments=bf16" in report.verdict


@pytest.mark.parametrize("moments", ["8bit", "bf16", "fp32"])
@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_what_the_formats_hold_is_not_reported(kind, moments):
    p = nn.Parameter(torch.zeros(N))
    optimizer = kind([p], lr=1e-3, weight_decay=0.1, moments=moments)
    meter = LostUpdateMeter(optimizer, every=60)
    for step in range(60):
        p.grad = gradients(step, 1e3)
        optimizer.step()
    (report,) = meter.report()
    assert report.slowed == 0
    assert 1 <= report.slowest < 2
    assert report.verdict == "none lost"


def test_moments_that_have_fallen_back_are_named_and_slow_nothing():
    p, optimizer = adamw("8bit", falls_back=True)
    meter = LostUpdateMeter(optimizer, every=10)

    def train() -> None:
        for step in range(50):
            p.grad = gradients(step, 1e7)
            optimizer.step()

    with pytest.warns(UserWarning, match="moments of w"):
        train()
    (report,) = meter.report()
    assert report.slowed == 0
    assert report.verdict == "none lost; 8-bit moments of 1 tensors have gone over to bf16"


def exact_moment(meter: LostUpdateMeter) -> np.ndarray:
    return meter._watches[0]._exact.get((0, 0)).double().numpy()


@pytest.mark.parametrize("how", ["grad", "gradients and multiplier", "closure"])
def test_the_fp32_moment_is_the_average_of_what_the_steps_were_given(how):
    p, optimizer = adamw("8bit", betas=(0.9, 0.9))
    meter = LostUpdateMeter(optimizer, every=1)
    v = np.zeros(N)
    for step in range(5):
        g = gradients(step, 1e7)
        if how == "gradients and multiplier":
            optimizer.step(gradients={p: g * 4}, multiplier=0.25)
        elif how == "closure":

            def closure(g=g):
                p.grad = g

            optimizer.step(closure)
        else:
            p.grad = g
            optimizer.step()
        v = 0.9 * v + 0.1 * g.double().numpy() ** 2
    # five steps of four fp32 roundings
    assert (np.abs(exact_moment(meter) - v) <= v * 20 * 2.0**-24).all()


def test_a_skipped_step_of_a_scaler_leaves_it_and_the_scale_is_taken_out():
    p, optimizer = adamw("8bit", betas=(0.9, 0.9))
    meter = LostUpdateMeter(optimizer, every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.tensor(0.0))  # makes the scale
    v = np.zeros(N)
    for step, overflow in enumerate([False, True, False]):
        scale = scaler.get_scale()
        g = gradients(step, 1e3)
        p.grad = g * scale
        if overflow:
            p.grad[7] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            v = 0.9 * v + 0.1 * g.double().numpy() ** 2
    assert (np.abs(exact_moment(meter) - v) <= v * 20 * 2.0**-24).all()


def test_it_starts_anew_where_a_state_is_loaded():
    p, optimizer = adamw("8bit")
    q, other = adamw("8bit")
    for step in range(3):
        q.grad = gradients(step, 1.0)
        other.step()
    meter = LostUpdateMeter(optimizer, every=1)
    p.grad = gradients(9, 1.0)
    optimizer.step()
    optimizer.load_state_dict(other.state_dict())
    optimizer.step()
    p.grad = None
    q.grad = gradients(9, 1.0)
    other.step()
    ours = exact_moment(meter)
    # of the two, 8 bits scatter; both have seen the four gradients of the other's run
    wanted = sum(0.999 ** (3 - i) * 1e-3 * gradients(s, 1.0).double() ** 2
                 for i, s in enumerate([0, 1, 2, 9]))  # fmt: skip
    assert abs(np.median(ours / wanted.numpy()) - 1) < 0.05


def test_parameters_without_a_gradient_keep_their_moment():
    p, q = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(200))
    optimizer = AdamW([p, q], betas=(0.9, 0.5), moments="8bit")
    meter = LostUpdateMeter(optimizer, every=1)
    for step in range(4):
        p.grad = torch.full((300,), 2.0)
        q.grad = torch.ones(200) if step % 2 else None
        optimizer.step()
    exact = meter._watches[0]._exact
    assert torch.allclose(exact.get((0, 0)), torch.tensor(4 * (1 - 0.5**4)))
    assert torch.allclose(exact.get((0, 1)), torch.tensor(1 - 0.5**2))
