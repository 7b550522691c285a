"""``halfstep.watch`` over ranks: counts of all of them, each number once."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.parity import backward_all, prepare
from torch import nn

import halfstep

pytestmark = pytest.mark.distributed


def by_name(step, *kinds):
    return {(one.kind, one.name): one for one in step.of(*kinds)}


def strategies(rank, layout, policy):
    """Two steps of the trainer's strategies under Precision, the second watched."""
    strategy, model, precision = prepare(layout, policy)
    with halfstep.watch(model, precision, every=2) as watched:
        for step in range(2):
            backward_all(strategy, model, precision, step, micro=2)
            precision.step(max_norm=1.0)
    assert "step" not in vars(precision)
    return watched.report()


@pytest.mark.parametrize(
    ("policy", "layout"),
    [("bf16-mixed", "tensor=2"), ("bf16-master", "shard=2"), ("fp16-mixed", "data=2")],
)
def test_strategies_count_as_one_device(pool2, layout, policy):
    one = strategies(0, "data=1", policy)
    two = pool2.run(strategies, layout=layout, policy=policy)[0]
    assert two.loss_scale == one.loss_scale
    assert two.applied is one.applied
    kinds = ("weight", "gradient", "update") if one.applied else ("weight", "gradient")
    want, found = by_name(one, *kinds), by_name(two, *kinds)
    assert found.keys() == want.keys()
    for key, values in found.items():
        assert values.elements == want[key].elements, key
        if key[0] == "weight":  # after one step whose sums were rounded in another order: bf16
            assert values.rms == pytest.approx(want[key].rms, rel=2**-7, abs=1e-3)
    want = by_name(one, "activation", "activation_gradient")
    found = by_name(two, "activation", "activation_gradient")
    assert found.keys() == want.keys()
    for key, values in found.items():
        # tensor ranks hold parts of the layers' insides and copies of what is between them; every
        # rank looks up the same positions
        times = (1, 2) if layout == "tensor=2" or key[1] == "wpe" else (1,)
        assert values.elements in [n * want[key].elements for n in times], key


def apart(rank):
    """Ranks that train models of their own, and one that has counted what the other has not."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for ranks in (halfstep.OneRank(), halfstep.ManyRanks("cpu")):
        with halfstep.watch(model, optimizer, ranks=ranks) as watched:
            out = model(torch.ones(2, 4))
            (model(out) if rank else out).sum().backward()
            if rank:
                model[0].bias.grad = None
            optimizer.step()
        found.append(watched.report())
    return found


def test_ranks_alone_and_ranks_that_counted_different_tensors(pool2):
    (alone, together), (other, _) = pool2.run(apart)
    assert [by_name(step, "activation")["activation", "0"].elements for step in (alone, other)] == [
        8, 16]  # fmt: skip
    assert by_name(together, "activation")["activation", "0"].elements == 24
    assert by_name(together, "gradient").keys() == by_name(alone, "gradient").keys()
