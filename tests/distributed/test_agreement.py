"""Ranks that have parted ways are stopped, all with the same words; ranks that have not are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed import parity
from every import every
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import check_agreement
from halfstep.errors import PrecisionError
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.step import Precision

LAYOUTS = [("data=2", 2), ("shard=2", 2), ("tensor=2", 2), ("data=2,tensor=2", 4),
           ("data=2,shard=2", 4), pytest.param("tensor=4", 4, marks=pytest.mark.slow),
           pytest.param("shard=4", 4, marks=pytest.mark.slow)]  # fmt: skip
pytestmark = pytest.mark.covering(ends=True)
distributed = pytest.mark.distributed
_WORDS = {2: torch.int16, 4: torch.int32}


def flip(tensor, place, bit):
    """Change one bit of one element, in place."""
    words = tensor.view(-1).view(_WORDS[tensor.element_size()])
    words[place] ^= 1 << bit


def told(precision, model, layout, **options):
    try:
        check_agreement(precision, model, layout, **{"step": 3, **options})
    except PrecisionError as error:
        return str(error)
    return ""


def after_training(rank, layout, policy, damage=(), steps=2, step=None):
    """What check_agreement says after steps; ``damage`` gives (rank, parameter, place, bit)."""
    strategy, model, precision = parity.prepare(layout, policy)
    for number in range(steps):
        parity.backward_all(strategy, model, precision, number)
        precision.step()
    named = dict(model.named_parameters())
    for where, name, place, bit in damage:
        if rank == where:
            part = local_part(named[name])
            with torch.no_grad():
                flip(part, place % part.numel(), bit)
    return told(precision, model, strategy.layout, step=3 if step is None else step[rank])


@distributed
@pytest.mark.parametrize(("layout", "size"), LAYOUTS)
@pytest.mark.parametrize("policy", ["fp32", "bf16-sr"])
def test_ranks_that_train_together_agree(request, layout, size, policy):
    """Sharded parts differ by right; replicated ones do not, stochastic rounding or not."""
    pool = request.getfixturevalue(f"pool{size}")
    assert pool.run(after_training, layout=layout, policy=policy) == [""] * size


@distributed
@pytest.mark.parametrize(("policy", "bit"), [("fp32", 0), ("bf16-pure", 9), ("fp16-master", 15)])
def test_one_bit_of_one_element_on_one_rank_stops_all(pool2, policy, bit):
    damage = [(1, "layers.1.mlp.up.weight", 77, bit)]
    texts = pool2.run(after_training, layout="data=2", policy=policy, damage=damage)
    assert texts[0] == texts[1]
    assert "rank 1 differs from rank 0 in layers.1.mlp.up.weight after step 3" in texts[0]
    assert "--resume" in texts[0]


DAMAGED = [
    ("data=2,tensor=2", 3, "layers.0.attn.qkv.weight", 1),  # split over tensor: copies 1 and 3
    ("data=2,tensor=2", 2, "layers.0.attn.qkv.weight", 0),
    ("data=2,tensor=2", 1, "final_norm.weight", 0),  # all four hold it
    ("data=2,shard=2", 3, "final_norm.weight", 1),  # split over shard
    ("data=2,shard=2", 2, "wte.weight", 0),
    ("tensor=4", 2, "layers.1.mlp.down.bias", 0),
    ("data=4", 3, "wte.weight", 0),
    ("shard=4", 3, "layers.0.mlp.up.weight", None),  # no other rank holds that part
    ("tensor=4", 3, "layers.0.mlp.up.weight", None),
]


@distributed
def test_the_rank_and_the_one_that_holds_the_same_part_are_named(pool4):
    def check(layout, damaged, name, other):
        damage = [(damaged, name, 1, 0)]
        texts = pool4.run(after_training, layout=layout, policy="fp32", damage=damage, steps=0)
        assert set(texts) == {texts[0]}
        wanted = f"rank {damaged} differs from rank {other} in {name} " if other is not None else ""
        assert wanted in texts[0]
        assert bool(texts[0]) == bool(wanted)

    every(DAMAGED, check)


def other_numbers(rank, what):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision("fp16-mixed,init_scale=256", model, optimizer)
    if rank == 1:
        if what == "the loss scale":
            precision.loss_scale.update(found_nonfinite=True)
        elif what == "the applied steps":
            precision.progress.applied_total += 1
    step = 7 + (rank == 1 and what == "the step count")
    return told(precision, model, Layout(data=2), step=step, when="before the first step")


@distributed
def test_counts_and_the_loss_scale_are_compared(pool2):
    for what in ("the step count (7 and 8)", "the applied steps (0 and 1)",
                 "the loss scale (256.0 and 128.0)"):  # fmt: skip
        texts = pool2.run(other_numbers, what=what.partition(" (")[0])
        assert texts[0] == texts[1]
        assert f"rank 1 differs from rank 0 in {what} before the first step" in texts[0]
    assert pool2.run(other_numbers, what="nothing") == ["", ""]
