"""The scaler of other people's loops over ranks: everyone steps or nobody does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distributed import grid
from halfstep.integrations.loop_scaler import LoopScaler
from halfstep.precision.masters.local_part import local_part

pytestmark = [pytest.mark.distributed, pytest.mark.covering]

BROKEN = {1: (0,), 2: (1,), 4: (0, 1)}  # by step: ranks whose gradient is not finite


def made(rank, sharded):
    """Parts of one tensor; or parameters of one's own, where only the flag can make ranks agree."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    if sharded:
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    nn.init.constant_(model.weight, 1.0 + rank)
    return model


def loop(rank, kind, clip, sharded):
    """An infinity stands in one rank's gradient, or part of it, only."""
    model = made(rank, sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=kind == "fused")
    scaler = LoopScaler("cpu", init_scale=256.0)
    scaler.bind(lambda: [optimizer], model.named_parameters)
    seen = []
    for step in range(6):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if rank in BROKEN.get(step, ()):
            local_part(model.weight.grad).fill_(math.inf)
        if clip:
            scaler.unscale_all_()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        before = grid.held(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result = scaler.last_step
        assert result.applied is not grid.same(before, grid.held(model))
        assert all(weight.isfinite().all() for weight in grid.held(model))
        seen.append((result.applied, result.next_loss_scale, result.skipped_total))
    return seen


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_skip_together(pool2, kind, clip, sharded):
    first, second = pool2.run(loop, kind=kind, clip=clip, sharded=sharded)
    assert first == second
    assert [applied for applied, _, _ in first] == [step not in BROKEN for step in range(6)]
    assert first[-1] == (True, 32.0, 3)
