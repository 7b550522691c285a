"""Replays against what optimizers really do, and gaps against the formats' own tables."""

import math

import pytest
import torch
from torch import nn

from halfstep.diagnostics.lost_updates import Chooser, after_step, before_step
from halfstep.diagnostics.meter import LostUpdateMeter, intended_updates, plain
from halfstep.optim import Muon
from halfstep.optim.optimizers import SGD, AdamW, Lion

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
        (Muon, {}, "the directions of Muon are those of whole matrices"),
    ],
)
def test_what_cannot_be_known_is_not_claimed(kind, options, why):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    weight.grad = torch.randn_like(weight)
    weight.grad[:32] = 0
    report = one_step(kind([weight], **options))
    assert math.isnan(report.lost)
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


def test_sparse_gradients_are_left_out_and_named():
    rows = nn.Embedding(10, 4, sparse=True)
    dense = nn.Parameter(torch.ones(8))
    (rows(torch.tensor([1, 2])).sum() + dense.sum()).backward()
    report = one_step(torch.optim.SGD([rows.weight, dense], lr=1.0))
    assert report.elements == 8
    assert report.note == "1 tensors with sparse gradients were not measured"
