"""Loops of somebody's own, without our strategies: DDP, fully_shard, parallelize_module."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.reference.adam import EPS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from distributed.parity import told, whole
from halfstep.precision.agreement import MARK
from halfstep.precision.ema import EMA
from halfstep.precision.step import Precision

ROWS = 8
RATE = 0.01  # of AdamW


class Net(nn.Module):
    """A norm that no plan names, and two layers that one does; odd sizes shard unevenly."""

    def __init__(self, width=6, hidden=8, outputs=5):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 5)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x):
        return self.down(self.again(torch.tanh(self.up(x))))


class _Copied(torch.autograd.Function):
    """Megatron's f: the input of a column-parallel layer; its gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Summed(torch.autograd.Function):
    """Megatron's g: the output of a row-parallel layer is a sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Split(nn.Module):
    """``down(gelu(up(norm(x))))`` by hand, with a part of ``up`` and ``down`` on each rank."""

    def __init__(self, rank, ranks, up, down, *, marked):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, dim=1)[rank].clone())
        for part in (self.up, self.down):
            if marked:
                setattr(part, MARK, True)

    def forward(self, x):
        hidden = F.gelu(F.linear(_Copied.apply(self.norm(x)), self.up))
        return _Summed.apply(F.linear(hidden, self.down))


def net(seed=3, **sizes):
    model = Net(**sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def data(step, part=None, parts=1):
    generator = torch.Generator().manual_seed(50 + step)
    x, y = torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 5, generator=generator)
    if part is None:
        return x, y
    return x.chunk(parts)[part], y.chunk(parts)[part]


def mse(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def wrap(kind, model, **casts):
    """What a loop of one's own does before it makes its optimizer."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for part in (model.up, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**casts))
        return model
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    return model


def make(kind, name):
    return {
        "foreach": lambda p: torch.optim.AdamW(p, lr=RATE, eps=EPS, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=RATE, eps=EPS, fused=True),
        "loop": lambda p: torch.optim.AdamW(p, lr=RATE, eps=EPS, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }[name]


def losses_of(kind, model, step, rank):
    """This rank's micro-batches; one device takes both ranks' shares."""
    if kind in ("ddp", "fsdp"):
        return [mse(model, data(step, rank, 2))]
    if kind == "tp":
        return [mse(model, data(step))]
    return [mse(model, data(step, part, 2)) / 2 for part in (0, 1)]


def train(rank, kind, policy="fp32", *, optimizer="foreach", ema=False):
    """A loop; an average is evaluated between steps."""
    model = wrap(kind, net())
    inner = model.module if kind == "ddp" else model
    used = make(kind, optimizer)(inner.parameters())
    average = EMA(inner, decay=0.5) if ema else None
    precision = Precision(policy, inner, used, ema=average)
    results, looks = [], []
    for step in range(4):
        with precision.autocast():
            losses = losses_of(kind, model, step, rank)
        for loss in losses:
            precision.backward(loss)
        results.append(precision.step())
        if ema:
            with average.applied_to(inner), torch.no_grad():
                looks.append(mse(model, data(77)).item())
    named = dict(inner.named_parameters())
    masters = {n: whole(named[n], v) for n, v in precision.masters.items()}
    averages = {n: whole(named[n], v) for n, v in average.averages.items()} if ema else {}
    return told(results) | {
        "weights": masters,
        "averages": averages,
        "looks": looks,
    }
