"""The grid of overflows: every layout over two ranks, every kind of optimizer, inf and NaN.

What the grids of ``GradScaler`` and of ``Precision`` have in common.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfstep
from distributed.loops import Split, Tied, data, mse, net, wrap
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan, choose_strategy
from halfstep.precision.masters.local_part import local_part

OPTIMIZERS = ("single", "foreach", "fused", "halfstep")
OWN_LOOP = ("plain", "ddp", "fsdp", "tied", "ddp tied", "fsdp tied", "tp", "hand")
"""What a loop does by itself; ``hand`` is tensor parallelism without DTensors."""
STRATEGIES = ("data=2", "data=2 tied", "shard=2", "tensor=2")
PLAN = {"norm": "replicate", "up": "colwise", "down": "rowwise"}


def build(layout, rank):
    """The model of a layout of :data:`OWN_LOOP`, the same on both ranks before it is laid out."""
    torch.manual_seed(7)
    kind = layout.split()[0]
    if kind == "hand":
        model = net()
        return Split(rank, 2, model.up.weight.detach(), model.down.weight.detach(), marked=True)
    if "tied" not in layout:
        return wrap(kind, net())
    if kind == "fsdp":
        return fully_shard(Tied(), mesh=init_device_mesh("cpu", (2,)))
    return wrap(kind, Tied())


def place(layout, policy):
    """The model and the strategy of a layout of :data:`STRATEGIES`."""
    torch.manual_seed(7)
    model = Tied() if "tied" in layout else net()
    strategy = choose_strategy(Layout.parse(layout.split()[0]), policy, "cpu")
    strategy.place_(model, ParallelPlan(blocks=(model.up,), tensor=PLAN))
    return model, strategy


def optimizer_of(name, parameters):
    if name == "halfstep":
        return halfstep.optim.AdamW(parameters, lr=0.01)
    return torch.optim.AdamW(parameters, lr=0.01, foreach=name == "foreach", fused=name == "fused")


def loss_of(layout, forward, step, rank):
    """This rank's loss of a step: of its half of the batch where the layout shares batches."""
    kind = layout.split()[0]
    if kind in ("ddp", "fsdp"):  # torch averages gradients
        return mse(forward, data(step, rank, 2))
    if kind in ("data=2", "shard=2"):  # gradients are sums over ranks
        return mse(forward, data(step, rank, 2)) / 2
    return mse(forward, data(step))


def last_matrix(model):
    """Name and value of a parameter that every layout has."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    name = "down.weight" if "down.weight" in named else "down"
    return name, named[name]


def break_gradient(model, value):
    """Put a value into this rank's finished gradient of the last matrix."""
    local_part(last_matrix(model)[1].grad).view(-1)[0] = value


def held(model):
    """A copy of what this rank holds of the weights."""
    return [local_part(p).detach().clone() for p in model.parameters()]


def same(first, second):
    """Whether two such lists are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class _Broken(torch.autograd.Function):
    """The same forwards; backwards a gradient with one value that is not finite."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = ctx.value
        return gradient, None


def breaking(model: nn.Module, value: float):
    """A forward whose backward meets a value that is not finite, on the rank that calls it."""
    return lambda x: _Broken.apply(model(x), value)
