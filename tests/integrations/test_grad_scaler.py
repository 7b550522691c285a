"""halfstep.GradScaler's account of a step, and its copies."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import GradScaler
from halfstep.integrations import grad_scaler
from integrations.lockstep import Plain, TakesScaler

INF, NAN = math.inf, math.nan
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "third party": Plain,
    "takes the scaler": TakesScaler,
}


class Two(nn.Module):
    """Two parameters whose gradients are what ``forward`` is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))

    def forward(self, first=(1.0, 2.0), second=(3.0, 4.0)):
        return (self.first * torch.tensor(first)).sum() + (self.second * torch.tensor(second)).sum()


@pytest.fixture(params=["cpu", "as on a GPU"])
def machine(request, monkeypatch):
    """The second one keeps every number as a tensor, as if reading it made the host wait."""
    if request.param != "cpu":
        monkeypatch.setattr(grad_scaler, "on_host", lambda tensor: False)
    return request.param


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the deprecated contract, as torch's
        yield


def made(kind="sgd", **options):
    model = Two()
    options = {"init_scale": 8.0, "growth_interval": 2, "names": model.named_parameters()} | options
    return model, OPTIMIZERS[kind](model.parameters()), GradScaler("cpu", **options)


def step(model, optimizer, scaler, first=(1.0, 2.0), second=(3.0, 4.0), unscale=False):
    optimizer.zero_grad()
    scaler.scale(model(first, second)).backward()
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k != "takes the scaler"])
def test_every_optimizers_steps_are_told(kind, unscale, machine):
    model, optimizer, scaler = made(kind)
    # a fused optimizer on a GPU steps without telling the host, which then looks at no gradient
    looks = machine == "cpu" or kind != "fused" or unscale
    assert scaler.last_step is None

    weights = [p.detach().clone() for p in model.parameters()]
    told = step(model, optimizer, scaler, second=(INF, 1.0), unscale=unscale)
    assert (told.applied, told.reason, told.loss_scale, told.next_loss_scale) == (
        False, "overflow", 8.0, 4.0)  # fmt: skip
    assert told.nonfinite_parameters == (("second",) if looks else ())
    assert (told.skipped_total, told.skipped_in_a_row, told.loss) == (1, 1, INF)

    told = step(model, optimizer, scaler, first=(NAN, 1.0), unscale=unscale)
    assert (told.applied, told.reason, told.nonfinite_parameters) == (
        (False, "nan_gradients", ("first",)) if looks else (False, "overflow", ()))  # fmt: skip
    assert (told.skipped_total, told.skipped_in_a_row, told.next_loss_scale) == (2, 2, 2.0)
    assert math.isnan(told.loss)
    assert all(map(torch.equal, weights, model.parameters()))

    told = step(model, optimizer, scaler, unscale=unscale)
    assert (told.applied, told.reason, told.nonfinite_parameters) == (True, None, ())
    assert (told.skipped_total, told.skipped_in_a_row, told.loss) == (2, 0, 10.0)
    assert math.isnan(told.grad_norm)
    assert not any(map(torch.equal, weights, model.parameters()))

    assert step(model, optimizer, scaler, unscale=unscale).next_loss_scale == 4.0
    told = step(model, optimizer, scaler, first=(1.0, -INF), second=(1.0, NAN), unscale=unscale)
    found = ("second", "first") if looks else ()
    assert (told.reason, told.nonfinite_parameters) == ("overflow", found)
    assert (told.skipped_total, told.skipped_in_a_row) == (3, 1)


def test_several_optimizers_are_told_one_by_one_and_counted_by_round(machine):
    model = Two()
    scaler = GradScaler("cpu", init_scale=8.0, names=model.named_parameters())
    one, two = torch.optim.SGD([model.first], lr=0.1), torch.optim.SGD([model.second], lr=0.1)
    for count in (1, 2):
        scaler.scale(model((INF, 1.0))).backward()
        scaler.step(one)
        told = scaler.last_step
        assert (told.applied, told.skipped_total, told.skipped_in_a_row) == (False, count, count)
        scaler.step(two)
        told = scaler.last_step
        assert (told.applied, told.skipped_total, told.skipped_in_a_row) == (True, count, 0)
        scaler.update()
        assert scaler.last_step.next_loss_scale == 8.0 / 2**count
        one.zero_grad()
        two.zero_grad()


class Reads(TorchDispatchMode):
    """Counts how often a value goes from a tensor to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "third party"])
@pytest.mark.parametrize("gradient", [1.0, INF])
def test_nothing_is_read_that_torch_does_not_read(kind, gradient, monkeypatch):
    monkeypatch.setattr(grad_scaler, "on_host", lambda tensor: False)
    reads = []
    for scaler_class in (torch.amp.GradScaler, GradScaler):
        model = Two()
        optimizer, scaler = OPTIMIZERS[kind](model.parameters()), scaler_class("cpu")
        with Reads() as counter:
            for _ in range(3):
                scaler.scale(model((gradient, 1.0))).backward()
                scaler.step(optimizer)
                scaler.update()
        reads.append(counter.count)
    assert reads[1] == reads[0]
    assert kind != "fused" or reads[0] == 0
    assert scaler.last_step.skipped_total == (0 if gradient == 1.0 else 3)
