"""``halfstep.watch`` over ranks: counts of all of them, each number once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.parity import backward_all, prepare
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep

pytestmark = pytest.mark.distributed


def data(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 16, generator=generator)
    return x[rows], torch.arange(8)[rows] % 4


def bare_loop(rank, path, kind, ranks=2):
    """Two steps of a torch loop; what rank 0 has counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    wrapped = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    source = optimizer if kind != "precision" else halfstep.Precision("fp32", model, optimizer)
    each = 8 // ranks
    with halfstep.watch(wrapped, source, every=2, to=path) as watched:
        for _ in range(2):
            x, y = data(slice(rank * each, rank * each + each))
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched.report()


def by_name(step, *kinds):
    return {(one.kind, one.name): one for one in step.of(*kinds)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_torch_loop_on_two_ranks_counts_as_one(pool2, tmp_path, kind):
    one = bare_loop(0, tmp_path / "one.jsonl", "alone", ranks=1)
    two = pool2.run(bare_loop, path=tmp_path / "two.jsonl", kind=kind)[0]
    (_, written) = halfstep.load_numerics(tmp_path / "two.jsonl").steps
    assert written == two
    assert two.step == 2
    kinds = ("weight", "gradient", "update", "activation", "activation_gradient")
    want, found = by_name(one, *kinds), by_name(two, *kinds)
    assert found.keys() == want.keys()
    for key, values in found.items():
        assert values.elements == want[key].elements
        mean = 2 if key[0] == "activation_gradient" else 1  # each rank's loss is the mean of half
        # gradients are summed over ranks in another order: a few ulp of fp32
        assert values.absmax == pytest.approx(mean * want[key].absmax, rel=1e-4)
        assert values.rms == pytest.approx(mean * want[key].rms, rel=1e-4)


def strategies(rank, layout, policy):
    """Two steps of the trainer's strategies under Precision, the second watched."""
    strategy, model, precision = prepare(layout, policy)
    with halfstep.watch(model, precision, every=2) as watched:
        for step in range(2):
            backward_all(strategy, model, precision, step, micro=2)
            precision.step(max_norm=1.0)
    assert "step" not in vars(precision)
    return watched.report()


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "fp16-mixed"])
@pytest.mark.parametrize("layout", ["data=2", "shard=2", "tensor=2"])
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


def test_four_ranks_that_shard_and_split_data(pool4):
    one = strategies(0, "data=1", "bf16-master")
    four = pool4.run(strategies, layout="data=2,shard=2", policy="bf16-master")[0]
    want, found = by_name(one, "weight"), by_name(four, "weight")
    assert {k: v.elements for k, v in found.items()} == {k: v.elements for k, v in want.items()}


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
