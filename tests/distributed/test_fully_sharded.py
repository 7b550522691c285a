"""Where weights lie under full sharding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed import parity
from halfstep import LayerHealth
from halfstep.distributed.strategy import plan_of
from halfstep.errors import ConfigError
from halfstep.precision.masters.local_part import local_part, reshard_

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

EVEN = {"vocab_size": 52}  # every first dim is a multiple of 4 then: nothing is filled up


def placed(rank, policy):
    _, model, precision = parity.prepare("shard=2", policy, shape=EVEN)
    whole = sum(math.prod(p.shape) for p in model.parameters())
    held = sum(p.numel() for p in precision.named_parameters().values())
    with precision.masters.installed():
        owned = sum(p.numel() for g in precision.optimizers[0].param_groups for p in g["params"])
    before = [isinstance(m, FSDPModule) for m in (model, *model.blocks())]
    with torch.no_grad():
        model.loss_sum(parity.sequences(0))
    gathered = type(model.wte.weight.data).__name__
    reshard_(model)
    return whole, held, owned, before, gathered, type(model.wte.weight.data).__name__


@pytest.mark.parametrize("policy", ["fp32", "bf16-master", "bf16-split"])
def test_each_rank_trains_half_of_the_numbers_and_gathered_weights_are_dropped(pool2, policy):
    for whole, held, owned, sharded, gathered, settled in pool2.run(placed, policy=policy):
        assert held == owned == whole // 2
        assert all(sharded)
        assert (gathered, settled) == ("Tensor", "DTensor")


def test_a_hugging_face_model_names_the_classes_of_its_blocks():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model._no_split_modules = ["Linear"]
    assert plan_of(model).blocks == (model[0], model[2])
    with pytest.raises(ConfigError, match="does not say what to shard"):
        plan_of(nn.Linear(1, 1))


def diverging(rank, layout):
    """A layer of which one rank alone lets its part grow; what each rank says of it."""
    strategy, model, precision = parity.prepare(layout, "fp32", shape=EVEN)
    layer = model.blocks()[0].mlp.up
    with LayerHealth(model, precision, every=1, tell=str) as health:
        for step in range(40):
            parity.backward_all(strategy, model, precision, step)
            precision.step()
            if step >= 30 and (rank == 1 or layout.startswith("data")):
                with torch.no_grad():
                    local_part(layer.weight).mul_(1.5)
    return [(a.layer, a.quantity, a.since) for a in health.alarms]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=2", "data=2"])
def test_all_ranks_say_the_same_of_a_layer(pool2, layout):
    one, other = pool2.run(diverging, layout=layout)
    assert one == other
    assert one[0][0].endswith("0.mlp.up")
