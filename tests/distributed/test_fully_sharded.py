"""Where weights lie under full sharding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import halfstep
from distributed import loops, parity
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


CASTS = {
    "default": {},
    "torchtitan": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "after a forward": {},
    "keeps the norm": {},
}


def cast_late(rank, policy, how):
    """Masters at the start, losses, and the gradients of the first backward."""
    model, mesh = loops.net(), init_device_mesh("cpu", (2,))
    for part in (*([model.norm] if how == "keeps the norm" else []), model.up, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**CASTS[how]))
    if how == "after a forward":
        loops.mse(model, loops.data(0)).backward()
        model.zero_grad()
    model.up.weight.mark = 5
    before = [*model.parameters()]
    own = "split" in policy
    makes = halfstep.optim.AdamW if own else torch.optim.AdamW
    precision = halfstep.Precision(policy, model, makes(model.parameters(), lr=0.01))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert model.up.weight.mark == 5
    named = dict(model.named_parameters())
    start = {n: parity.whole(named[n], v) for n, v in precision.masters.items()}
    losses, gradients = [], {}
    for step in range(4):
        with precision.autocast():
            loss = loops.mse(model, loops.data(step, rank, 2))
        precision.backward(loss)
        if not gradients:
            gradients = {n: p.grad.full_tensor().float() for n, p in model.named_parameters()}
        losses.append(precision.step().loss)
    return start, losses, gradients, {n: str(p.dtype) for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", CASTS)
@pytest.mark.parametrize(
    "policy", ["bf16-split", *(pytest.param(p, marks=pytest.mark.slow) for p in
                               ("bf16-master", "fp16-master,init_scale=256"))]
)  # fmt: skip
def test_a_sharded_model_is_cast_in_place_and_masters_keep_its_fp32_values(pool2, policy, how):
    """Sums are added in fp32, where FSDP2 alone would add them in 16 bits."""
    if how == "torchtitan" and policy.startswith("fp16"):
        pytest.skip("gathers in bf16")
    low = torch.float16 if policy.startswith("fp16") else torch.bfloat16
    policy += ",keep_fp32=type:LayerNorm" * (how == "keeps the norm")
    alone, shares = loops.net(), []
    exact = dict(alone.named_parameters())
    for rank in (0, 1):
        copy = loops.net()
        makes = halfstep.optim.AdamW if "split" in policy else torch.optim.AdamW
        precision = halfstep.Precision(policy, copy, makes(copy.parameters()))
        with precision.autocast():
            loss = loops.mse(copy, loops.data(0, rank, 2))
        precision.backward(loss)
        shares.append({n: p.grad.float() for n, p in copy.named_parameters()})
    first, other = pool2.run(cast_late, policy=policy, how=how)
    assert first[1] == other[1]
    for name, value in exact.items():
        stored = low if not (how == "keeps the norm" and "norm" in name) else torch.float32
        assert torch.equal(first[0][name], value.detach()), name
        assert first[3][name] == str(stored)
        if low is torch.bfloat16:  # of fp16, the scaled sums are rounded
            mean = ((shares[0][name] + shares[1][name]) / 2).to(stored).float()
            assert torch.equal(first[2][name], mean), name
