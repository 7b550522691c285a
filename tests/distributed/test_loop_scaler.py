"""The scaler of other people's loops over ranks: everyone steps or nobody does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from halfstep.errors import PrecisionError
from halfstep.integrations.loop_scaler import LoopScaler

pytestmark = pytest.mark.distributed

BROKEN = {1: (0,), 2: (1,), 4: (0, 1)}  # by step: ranks whose gradient is not finite


def loop(rank, kind, clip):
    """Ranks with parameters of their own, as under FSDP2: only the flag can make them agree."""
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 1.0 + rank)
    make = {
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.1),
    }
    optimizer = make[kind](model.parameters())
    scaler = LoopScaler("cpu", init_scale=256.0)
    scaler.bind(lambda: [optimizer], model.named_parameters, None)
    seen = []
    for step in range(6):
        bad = math.inf if rank in BROKEN.get(step, ()) else 1.0
        scaler.scale((model(torch.ones(1, 3)) * bad).sum()).backward()
        if clip:
            scaler.unscale_all_()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result = scaler.last_step
        assert result.applied is not torch.equal(before, model.weight)
        seen.append((result.applied, result.next_loss_scale, result.skipped_total))
    return seen


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("clip", [False, True])
def test_ranks_skip_together(pool2, kind, clip):
    first, second = pool2.run(loop, kind=kind, clip=clip)
    assert first == second
    assert [applied for applied, _, _ in first] == [step not in BROKEN for step in range(6)]
    assert first[-1] == (True, 32.0, 3)


def sharded(rank, kind, clip):
    """FSDP2, where an infinity stands in one rank's part of the gradient only."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=kind == "fused")
    scaler = LoopScaler("cpu", init_scale=256.0)
    scaler.bind(lambda: [optimizer], model.named_parameters, None)
    seen = []
    for step in range(6):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if rank in BROKEN.get(step, ()):
            model.weight.grad.to_local().fill_(math.inf)
        if clip:
            scaler.unscale_all_()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        before = model.weight.detach().to_local().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result = scaler.last_step
        assert result.applied is not torch.equal(before, model.weight.to_local())
        assert model.weight.to_local().isfinite().all()
        seen.append((result.applied, result.next_loss_scale, result.skipped_total))
    return seen


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("clip", [False, True])
def test_parts_of_one_tensor_skip_together(pool2, kind, clip):
    first, second = pool2.run(sharded, kind=kind, clip=clip)
    assert first == second
    assert [applied for applied, _, _ in first] == [step not in BROKEN for step in range(6)]


def auto(rank, broken):
    weight = nn.Parameter(torch.ones(()))
    scaler = LoopScaler("cpu", init_scale="auto", strict=True)
    factor = [2.0**120, 2.0**110][rank] if rank not in broken else math.nan
    try:
        scaler.scale(weight * factor)
    except PrecisionError as error:
        return str(error)
    return scaler.get_scale()


def test_auto_takes_the_smallest_of_the_ranks_scales(pool2):
    # 2^120 * 2^7 is the last power of two in fp32; the other rank alone could have had 2^17
    assert pool2.run(auto, broken=()) == [2.0**7, 2.0**7]


def test_auto_stops_on_all_ranks_where_one_has_no_finite_loss(pool2):
    first, second = pool2.run(auto, broken=(1,))
    assert "another rank's first loss" in first
    assert "the loss is nan before any scaling" in second


def without_gradient(rank):
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight])
    scaler = LoopScaler("cpu")
    loss = scaler.scale(weight * 2)
    if rank == 0:
        loss.backward()
    try:
        scaler.step(optimizer)
    except (PrecisionError, AssertionError) as error:
        return type(error).__name__, float(weight)
    return "stepped"


def test_a_rank_without_gradients_keeps_nobody_waiting(pool2):
    assert pool2.run(without_gradient) == [("PrecisionError", 1.0), ("AssertionError", 1.0)]
