"""The lost-update meter against NumPy, against real training, and around other people's loops."""

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.diagnostics import lost_updates
from halfstep.diagnostics.lost_updates import LostUpdateMeter
from halfstep.optim import Muon
from halfstep.optim.optimizers import AdamW
from halfstep.precision.step import Precision


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    """Look at every element."""
    monkeypatch.setattr(lost_updates, "SAMPLE", 10**7)


def bf16(values):
    """NumPy fp64 rounded to the nearest bf16, ties to even, by bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Gain(nn.Module):
    """512 gains at 1.0, as of a norm, whose gradients are of both signs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))

    def forward(self, x):
        return (self.weight * x).float().square().mean()


def measured(optimizer, gradients):
    meter = LostUpdateMeter(optimizer, every=1)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()
    meter.close()
    return meter.report()


@pytest.mark.covering
@pytest.mark.parametrize(("lr", "share"), [(1e-3, 0.0), (1e-4, 0.12), (3e-5, 0.70), (1e-6, 0.98)])
def test_first_step_of_bf16_adamw(lr, share):
    generator = np.random.default_rng(0)
    w = bf16(generator.normal(0, 0.02, 40_000))
    g = bf16(generator.normal(0, 1, 40_000))
    # Kingma and Ba, algorithm 1, at t = 1: m / (1 - beta1) = g, v / (1 - beta2) = g^2.
    moved = bf16(w.astype(np.float64) - lr * g / (np.abs(g) + 1e-8))
    expected = np.mean(moved == w)

    weight = nn.Parameter(torch.tensor(w).bfloat16())
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0)
    (report,) = measured(optimizer, {weight: torch.tensor(g)})
    # Moments rounded to bf16 make an update up to 2^-8 larger or smaller than in the oracle, which
    # counts for elements that close to half a gap.
    assert report.lost == pytest.approx(expected, abs=0.01)
    # The table of the design gives whole percents, of another draw.
    assert report.lost == pytest.approx(share, abs=0.015)
    assert report.lost == report.unmoved
    assert report.updates == 40_000


def test_what_is_below_the_last_bit_of_fp32_is_not_called_lost():
    weight = nn.Parameter(torch.ones(64))
    (report,) = measured(torch.optim.SGD([weight], lr=1e-9), {weight: torch.ones(64)})
    assert report.lost == 1.0
    assert report.verdict == "100 % of updates at lr 1e-09 are below the last bit of fp32"


@pytest.mark.parametrize(
    "policy", ["bf16-pure", "bf16-master", "bf16-split", "bf16-split24", "bf16-kahan", "bf16-sr"]
)
def test_gains_stand_still_in_pure_bf16_alone(policy):
    torch.manual_seed(0)
    model = Gain()
    kind = torch.optim.AdamW if policy in ("bf16-master", "bf16-pure") else AdamW
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.0)
    precision = Precision(policy, model, optimizer)
    meter = LostUpdateMeter(precision)
    for _ in range(200):
        with precision.autocast():
            loss = model(torch.randn(8, 512))
        precision.step(loss)
    (report,) = meter.report()
    assert report.step == 200
    if policy == "bf16-pure":
        assert int((model.weight != 1).sum()) == 0
        assert (report.lost, report.stuck) == (1.0, ("weight",))
        return
    assert int((model.weight != 1).sum()) >= 500
    assert report.lost == 0
    assert report.stuck == ()
    if policy == "bf16-sr":  # most single updates leave the weight, and that is no loss
        assert report.unmoved > 0.5
        assert report.verdict.startswith("moves on average;")
    elif policy != "bf16-split24":
        assert report.verdict == "none lost"


def test_groups_have_names_and_their_own_shares():
    still = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    moving = nn.Parameter(torch.full((500,), 1e-3, dtype=torch.bfloat16))
    named = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW(
        [
            {"params": [still], "weight_decay": 0.0},
            {"params": [moving], "weight_decay": 0.1, "lr": 1e-2},
            {"params": [named], "name": "gains"},
            {"params": [nn.Parameter(torch.ones(8))], "name": "idle"},
        ],
        lr=1e-3,
    )
    ones = {p: torch.ones_like(p) for p in (still, moving, named)}
    reports = {r.group: r for r in measured(optimizer, ones)}
    assert list(reports) == ["group 0 (weight decay 0)", "group 1 (weight decay 0.1)", "gains"]
    assert [r.lost for r in reports.values()] == [1.0, 0.0, 0.0]
    assert [r.learning_rate for r in reports.values()] == [1e-3, 1e-2, 1e-3]
    assert [r.stored for r in reports.values()] == ["bf16", "bf16", "fp32"]


def test_a_small_stuck_tensor_is_seen_in_a_large_group_and_does_not_distort_it():
    large = nn.Parameter(torch.full((1000, 1000), 1e-3, dtype=torch.bfloat16))
    gain = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([("layer.weight", large), ("norm.weight", gain)], lr=1e-3)
    (report,) = measured(optimizer, {p: torch.ones_like(p) for p in (large, gain)})
    assert report.lost == pytest.approx(100 / 1_000_100, rel=1e-9)
    assert report.stuck == ("norm.weight",)
    assert "1 of 2 tensors do not move: norm.weight" in report.verdict


def test_a_sample_is_close_to_the_whole(monkeypatch):
    torch.manual_seed(0)
    start, gradient = torch.randn(100_000).bfloat16(), torch.randn(100_000)
    lost = []
    for sample in (4096, 10**7):
        monkeypatch.setattr(lost_updates, "SAMPLE", sample)
        weight = nn.Parameter(start.clone())
        (report,) = measured(torch.optim.AdamW([weight], lr=1e-3), {weight: gradient})
        lost.append(report.lost)
    # Binomial: 4 standard deviations of a share of 4096 are at most 4 * 0.5 / 64.
    assert lost[0] == pytest.approx(lost[1], abs=0.032)
    assert lost[0] != lost[1]


@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler_loop(fused):
    weight = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=fused, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    meter = LostUpdateMeter(optimizer, every=1)

    def step(x):
        optimizer.zero_grad()
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(torch.ones(100))
    (first,) = meter.report()
    assert first.lost == 0
    step(torch.full((100,), float("inf")))  # a fused optimizer is called all the same
    assert meter.report() == (first,)
    step(torch.ones(100))
    (third,) = meter.report()
    assert third.step == (3 if fused else 2)


def test_measuring_changes_nothing():
    def train(every):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 1)
        )
        own = AdamW(model[0].parameters(), lr=1e-3, update="split", moments="8bit")
        stock = torch.optim.AdamW([*model[1].parameters(), *model[3].parameters()], lr=1e-3)
        model.bfloat16()
        meter = LostUpdateMeter([own, stock], every=every)
        for _ in range(12):
            model(torch.randn(8, 16, dtype=torch.bfloat16)).square().mean().backward()
            for optimizer in (own, stock):
                optimizer.step()
                optimizer.zero_grad()
            meter.report()
        states = [*own.state_dict()["state"].values(), *stock.state_dict()["state"].values()]
        return [*model.parameters()], states, torch.get_rng_state()

    for a, b in zip(train(0), train(1), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_step_reads_nothing_from_the_device(monkeypatch):
    weights = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.ones(30))]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    meter = LostUpdateMeter(optimizer, every=1)

    def forbidden(*args):
        raise AssertionError("the host waited for a tensor")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, forbidden)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
    assert [r.step for r in meter.report()] == [3]


@pytest.mark.parametrize("kind", [torch.optim.Rprop, Muon])
def test_what_cannot_be_known_is_not_claimed(kind):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    gradient = torch.randn_like(weight)
    gradient[:32] = 0
    (report,) = measured(kind([weight]), {weight: gradient})
    assert np.isnan(report.lost)
    assert 0 <= report.unmoved < 0.1
    assert (report.updates, report.stuck) == (2048, ())
    assert "of weights with a gradient did not change" in report.verdict


def test_what_nobody_meant_to_move_is_not_lost():
    weight = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    for rate, gradient in ((0.0, 1.0), (1e-3, 0.0)):
        (report,) = measured(
            torch.optim.SGD([weight], rate), {weight: torch.full((100,), gradient)}
        )
        assert (report.lost, report.updates, report.stuck) == (0, 0, ())
        assert report.verdict.startswith("no update")


def test_momentum_moves_what_has_no_gradient_now():
    weight = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=1e-3, update="nearest", moments="8bit")
    for gradient in (1.0, 0.0):
        (report,) = measured(optimizer, {weight: torch.full((100,), gradient)})
        assert (report.lost, report.updates) == (1.0, 100)


def test_gradients_of_a_closure_are_those_it_computes_and_sparse_ones_are_left_out():
    rows = nn.Embedding(10, 4, sparse=True)
    weight = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))

    def closure():
        weight.grad = torch.ones_like(weight)
        rows(torch.tensor([1, 2])).sum().backward()
        return 0.0

    optimizer = torch.optim.SGD([weight, rows.weight], lr=1e-3)
    meter = LostUpdateMeter(optimizer, every=1)
    optimizer.step(closure)
    (report,) = meter.report()
    assert (report.updates, report.lost, report.tensors) == (100, 1.0, 1)
