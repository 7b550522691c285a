"""Replays against what optimizers really do, and gaps against the formats' own tables."""

import math

import pytest
import torch
from torch import nn

from halfstep.diagnostics.lost_updates.meter import LostUpdateMeter, intended_updates, plain
from halfstep.diagnostics.lost_updates.sampling import Chooser, after_step, before_step
from halfstep.formats import BF16, FP16, FP32
from halfstep.optim import Muon
from halfstep.optim.optimizers import SGD, AdamW, Lion
from halfstep.precision.masters.rounding import half_gap

STOCK = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.SGD, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
]


def replay(optimizer, *, own, samples=10**7):
    """(intended, real) changes of the optimizer's first parameter in its next step, and indices."""
    parameter = optimizer.param_groups[0]["params"][0]
    read = optimizer.read_master if own else torch.clone
    with torch.no_grad():
        before = read(parameter).double()
        step = before_step(optimizer, 1, Chooser(samples, 0), {}, (optimizer,), {})
        index = step.groups[0].places[0][1]
        optimizer.step()
        after_step(optimizer, step)
        real = (read(parameter).double() - before).take(index)
    group = step.groups[0]
    options = {key: plain(value) for key, value in group.options.items()}
    updates = intended_updates(optimizer, options, [s.on_cpu() for s in group.samples], 1.0)
    assert not isinstance(updates, str), updates
    return updates[0], real


@pytest.mark.parametrize(("kind", "options"), STOCK)
def test_stock_optimizers_are_replayed(kind, options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(60, 50, dtype=torch.float64))
    optimizer = kind([weight], lr=1e-2, **options)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        intended, real = replay(optimizer, own=False, samples=100)
        assert 90 < len(intended) <= 100  # drawn with replacement, doubles dropped
        # AdamW's rule rounds the root of its second moment to fp32, which moves its part of the
        # change by 2^-24: a few learning rates of 1e-2, from which the decay may cancel some.
        torch.testing.assert_close(intended, real, rtol=0, atol=3e-2 * 2**-24)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_own_optimizers_are_replayed_from_every_format(kind, moments):
    torch.manual_seed(0)
    memory = torch.channels_last
    weight = nn.Parameter(torch.randn(4, 8, 6, 5).bfloat16().to(memory_format=memory))
    optimizer = kind([weight], lr=1e-2, weight_decay=0.1, update="split", moments=moments)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        intended, real = replay(optimizer, own=True, samples=200)
        # Real weights are fp32 of up to about 4, so their change is known to 2^-22.
        torch.testing.assert_close(intended, real, rtol=0, atol=2**-21)
        assert float(intended.abs().min()) > 0


@pytest.mark.parametrize("layout", [lambda w: w, lambda w: w.T.contiguous().T])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Muon, {"adjust_lr_fn": "match_rms_adamw", "moments": "8bit"}),
        (Muon, {"moments": "fp32"}),
    ],
)
def test_directions_of_whole_matrices_are_replayed_as_they_were(kind, options, layout):
    torch.manual_seed(0)
    weight = nn.Parameter(layout(torch.randn(60, 50).bfloat16()))
    optimizer = kind([weight], **{"lr": 1e-2, "update": "split", **options})
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        intended, real = replay(optimizer, own=True, samples=200)
        torch.testing.assert_close(intended, real, rtol=0, atol=2**-21)
        assert float(intended.abs().max()) > 1e-3
        assert optimizer.on_direction is None


@pytest.mark.parametrize("form", [BF16, FP16, FP32], ids=lambda form: form.name)
def test_half_gaps_are_half_the_way_to_the_neighbours(form):
    values = [0.0, 1.0, -1.0, 1.5, 2.0**-10, -(2.0**-20), 3.0, form.min_normal, form.min_subnormal,
              form.max / 2, form.min_normal * 1.5, -1 - form.eps]  # fmt: skip
    values = [
        value for value in values if float(form.round_to(torch.tensor(value).double())) == value
    ]
    for sign in (1.0, -1.0):
        found = half_gap(
            torch.tensor(values, dtype=torch.float64),
            torch.full((len(values),), sign, dtype=torch.float64),
            form.dtype,
        )
        for value, half in zip(values, found.tolist(), strict=True):
            below, above = form.neighbours(value)
            assert half == ((above - value) if sign > 0 else (value - below)) / 2, value


class SignDescent(torch.optim.Optimizer):
    """Somebody's, element by element."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def one_step(optimizer, samples=512):
    meter = LostUpdateMeter(optimizer, every=1, samples=samples)
    optimizer.step()
    meter.close()
    return meter.report()[0]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (SignDescent, {}, "the rule of SignDescent is not one of those that are replayed"),
        (torch.optim.RMSprop, {}, "the rule of RMSprop is not one of those"),
        (torch.optim.AdamW, {"amsgrad": True}, "the rule of AdamW is not one of those"),
    ],
)
def test_what_cannot_be_known_is_not_claimed(kind, options, why):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    weight.grad = torch.randn_like(weight)
    weight.grad[:32] = 0
    report = one_step(kind([weight], **options))
    assert math.isnan(report.lost)
    assert math.isnan(report.frozen_below)
    assert 0 <= report.unmoved < 0.1
    assert report.zero == pytest.approx(0.5, abs=0.1)  # 512 of 4096: 4 standard deviations
    assert why in report.verdict
    assert "of weights with a gradient did not change" in report.verdict


@pytest.mark.parametrize("by_name", [True, False])
def test_gradients_of_a_closure_are_those_it_computes(by_name):
    weight = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)

    def closure():
        weight.grad = torch.ones_like(weight)
        return 0.0

    optimizer = torch.optim.SGD([weight], lr=1e-3)
    meter = LostUpdateMeter(optimizer, every=1)
    optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    (report,) = meter.report()
    assert (report.zero, report.lost) == (0.0, 1.0)


@pytest.mark.parametrize("way", ["nearest", "split"])
def test_lost_updates_of_whole_matrices_are_counted(way):
    """The oracle counts the elements that did not change: every update here is meant to move."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64).bfloat16())
    weight.grad = torch.randn_like(weight)
    before = weight.detach().clone()
    optimizer = Muon([weight], lr=3e-3, update=way, weight_decay=0.0)
    report = one_step(optimizer, samples=10**5)
    same = float((weight == before).float().mean())
    if way == "split":
        assert (report.lost, report.unmoved) == (0.0, 0.0)
    else:
        assert 0.2 < report.lost < 1.0
        assert report.lost == same
    # half of them would be lost below this rate, which is proportional to the updates
    assert 0 < report.frozen_below < (1.0 if way == "nearest" else 1e-4)


def test_a_direction_that_another_meter_took_is_not_claimed():
    weight = nn.Parameter(torch.randn(64, 64))
    weight.grad = torch.randn_like(weight)
    optimizer = Muon([weight])
    meters = [LostUpdateMeter(optimizer, every=1) for _ in range(2)]
    optimizer.step()
    first, second = (meter.report()[0] for meter in meters)
    assert math.isnan(first.lost)
    assert "the direction of Muon was given to another meter" in first.verdict
    assert second.lost < 0.01  # of fp32


def test_sparse_gradients_are_left_out_and_named():
    rows = nn.Embedding(10, 4, sparse=True)
    dense = nn.Parameter(torch.ones(8))
    (rows(torch.tensor([1, 2])).sum() + dense.sum()).backward()
    report = one_step(torch.optim.SGD([rows.weight, dense], lr=1.0))
    assert report.elements == 8
    assert report.note == "1 tensors with sparse gradients were not measured"
