"""Ranks that have parted ways are stopped, all with the same words; ranks that have not are not."""

from __future__ import annotations

import math
from contextlib import nullcontext
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import halfstep
from distributed import parity
from distributed.pool import Pool
from every import every
from halfstep.errors import PeerError, PrecisionError
from halfstep.precision.agreement import ManyRanks
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


def told(work, *arguments):
    """The error's text, or "" if there is none."""
    try:
        work(*arguments)
    except (PrecisionError, PeerError) as error:
        return str(error)
    return ""


def after_training(rank, layout, policy, damage=(), steps=2, by_step=False):
    """What ranks say after steps; ``damage`` gives (rank, parameter, place, bit)."""
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
    if by_step:
        parity.backward_all(strategy, model, precision, steps)
    return told(precision.step if by_step else precision.ranks.agree)


@distributed
@pytest.mark.parametrize(("layout", "size"), LAYOUTS)
@pytest.mark.parametrize("policy", ["fp32", "bf16-sr"])
def test_ranks_that_train_together_agree(request, layout, size, policy):
    """Sharded parts differ by right; replicated ones do not, stochastic rounding or not."""
    pool = request.getfixturevalue(f"pool{size}")
    assert pool.run(after_training, layout=layout, policy=policy) == [""] * size


@distributed
@pytest.mark.parametrize(("policy", "bit"), [("fp32", 0), ("bf16-pure", 9), ("fp16-master", 15)])
def test_one_bit_of_one_element_on_one_rank_stops_all_in_the_next_step(pool2, policy, bit):
    damage = [(1, "layers.1.mlp.up.weight", 77, bit)]
    texts = pool2.run(after_training, layout="data=2", policy=policy, damage=damage, by_step=True)
    assert texts[0] == texts[1]
    assert "rank 1 differs from rank 0 in layers.1.mlp.up.weight at step 3" in texts[0]
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
        wanted = f"differs from rank {other} in {name} " if other is not None else ""
        assert wanted in texts[0]
        assert f"rank {damaged} " in texts[0] or not wanted
        assert bool(texts[0]) == bool(wanted)

    every(DAMAGED, check)


def faulty(rank, fault, wrap, policy, at, faulty, seed):
    """What a loop of five steps says whose rank ``faulty`` errs in step ``at``, and in which."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4))
    forward = nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = Precision(policy, forward, optimizer)
    for step in range(1, 6):
        torch.manual_seed(
            100 * seed + 10 * step + (rank if wrap == "ddp" or fault == "reduce" else 0)
        )
        errs = step == at
        quiet = forward.no_sync() if wrap == "ddp" and errs and fault == "reduce" else nullcontext()
        with quiet, precision.autocast():
            precision.backward(forward(torch.randn(4, 8)).float().square().mean())
        if errs and rank == faulty:
            if fault == "weights":
                with torch.no_grad():
                    model[2].bias[1] += 0.1
            elif fault == "scale":
                precision.loss_scale.update(found_nonfinite=True)
            elif fault == "zero_grad":
                optimizer.zero_grad()
                continue
        leaves = errs and rank == faulty and fault == "discard"
        if text := told(precision.discard if leaves else precision.step):
            return step, text
    return 0, ""


FAULTS = {
    ("none", "ddp"): "",
    ("none", "plain"): "",
    ("reduce", "ddp"): "norm of gradients",
    ("reduce", "plain"): "norm of gradients",
    ("weights", "ddp"): "2.bias at step",
    ("weights", "plain"): "2.bias at step",
    ("discard", "ddp"): "discard() leaves out",
    ("zero_grad", "plain"): "in the step",
    ("scale", "ddp"): "the loss scale",
}


def in_the_first_step(pool, cases):
    def check(fault, wrap, policy, at, rank, seed):
        found = pool.run(
            faulty, fault=fault, wrap=wrap, policy=policy, at=at, faulty=rank, seed=seed
        )
        (step, text), *others = found
        assert {told for _, told in others} == {text}
        what = FAULTS[fault, wrap]
        assert what in text
        if what:
            first = 1 if (fault, wrap) == ("reduce", "plain") else at + (fault == "zero_grad")
            assert step in (first, at)
            assert fault == "reduce" or f"rank {rank}" in text
            assert "rank " in text
        else:
            assert (step, text) == (0, "")

    every(cases, check)


@distributed
def test_a_fault_is_found_in_the_first_step_and_its_rank_is_named(pool2):
    in_the_first_step(pool2, [(*kind, "fp16-mixed", 2, 1, 0) for kind in FAULTS])


def ends(rank, how):
    """A rank that ends the wrong way under DDP, in a group that waits for three seconds."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    with Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1)) as precision:
        for step in range(3):
            precision.backward(model(torch.ones(2, 4)).square().mean())
            if step == 1 and rank == 1:
                if how == "raises":
                    raise ValueError("my own data error")
                continue
            precision.step()


@distributed
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "skips"])
def test_a_rank_that_raises_or_skips_is_told_by_name(how):
    pool = Pool(2)
    try:
        with pytest.raises(AssertionError) as error:
            pool.run(ends, how=how)
    finally:
        pool.close()
    first = str(error.value).partition("rank 1: Traceback")[0]
    if how == "raises":
        assert "PeerError: " in first
        assert "rank 1: ValueError: my own data error" in first
    else:
        assert "as this one takes step 2: rank 1: runs a backward after step 1" in first


def norm_of_meshes(rank, seed, shapes):
    """Norms that steps report, over those of the whole gradients, for random placements."""
    random, ratios = Random(seed), []
    for _ in range(10):
        shape = random.choice(shapes)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5))
        if random.random() < 0.5:
            if len(shape) > 1:
                plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
                parallelize_module(model, mesh["abc"[len(shape) - 1]], plan)
            fully_shard(model, mesh=mesh["abc"[0]] if len(shape) < 3 else mesh["a", "b"])
        else:
            for layer in model:
                for name, p in layer.named_parameters():
                    kinds = [Shard(0), Shard(p.ndim - 1), Replicate()]
                    placed = distribute_tensor(
                        p.detach(), mesh, [random.choice(kinds) for _ in shape]
                    )
                    setattr(layer, name, nn.Parameter(placed))
        precision = Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.0))
        precision.backward(sum((p * p * p).sum().full_tensor() for p in model.parameters()))
        whole = [p.grad.full_tensor().double().square().sum() for p in model.parameters()]
        ratios.append(precision.step().grad_norm / math.sqrt(sum(whole)))
        precision.close()
    return ratios


def strided(rank):
    """How many parts a parameter has that FSDP2 splits over tensor parallelism."""
    mesh, placements = init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=2)]
    part = DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)
    return ManyRanks("cpu").share_of(part).parts


def right_norms(pool, seed, shapes):
    found = pool.run(norm_of_meshes, seed=seed, shapes=shapes)
    assert all(ratios == found[0] for ratios in found)
    assert found[0] == pytest.approx([1.0] * len(found[0]), abs=1e-6)


@distributed
def test_the_norm_is_right_on_any_mesh(pool2):
    right_norms(pool2, 1, [(2,), (1, 2), (2, 1)])
    assert pool2.run(strided) == [2, 2]


@distributed
def test_the_norm_is_right_on_forty_meshes_of_four_ranks(pool4):
    for seed in range(4):
        right_norms(pool4, seed, [(4,), (2, 2), (1, 4), (4, 1), (2, 2, 1), (1, 2, 2)])


def in_a_group(rank, members, size):
    """Steps of the members of a group, in each kind of wrapper; the others do nothing at all."""
    group = dist.new_group(members, use_local_synchronization=True) if rank in members else None
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    done = []
    for wrapper, ranks in (("ddp", None), ("fsdp", None), ("fsdp", mesh), ("ddp", group),
                           ("ddp", ManyRanks(group=group)), ("none", group), ("scaler", group),
                           ("scaler", mesh), ("scaler fsdp", None)):  # fmt: skip
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        if "fsdp" in wrapper:
            fully_shard(model, mesh=mesh)
        elif wrapper == "ddp":
            model = nn.parallel.DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(torch.ones(2, 8)).square().mean()
        if "scaler" in wrapper:
            scaler = halfstep.GradScaler("cpu", ranks=ranks)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            done.append(scaler.last_step.applied)
        else:
            precision = Precision("bf16-mixed", model, optimizer, ranks=ranks)
            done.append(precision.step(loss).applied)
    return done


@distributed
def test_ranks_outside_of_a_group_do_nothing(pool2):
    assert pool2.run(in_a_group, members=[1], size=2) == [None, [True] * 9]


@distributed
def test_two_of_four_ranks_train_and_two_do_not(pool4):
    assert pool4.run(in_a_group, members=[1, 3], size=4) == [None, [True] * 9] * 2


def refused(rank):
    """The refusals of ``ranks=``, and whether what they tell to do runs."""
    half = DeviceMesh("cpu", [rank])
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    texts = [
        told(lambda: Precision("fp32", model, optimizer, ranks=half)),
        told(lambda: ManyRanks(group=dist.new_group([1 - rank]))),
        told(lambda: Precision("fp32", model, optimizer, ranks=3)),
    ]
    Precision("fp32", model, optimizer, ranks=model.weight.device_mesh)
    return texts


@distributed
def test_refusals_of_groups_name_what_runs(pool2):
    split, other, wrong = pool2.run(refused)[0]
    assert "weight lies over ranks [0, 1], and ranks= has only [0]" in split
    assert "this is rank 0" in other or "not in the group" in other
    assert "a process group" in wrong


def in_one_group_more(rank):
    dist.new_group([0])
    return ManyRanks(group=dist.new_group([0, 1], timedelta(seconds=33))).worst([rank])


def test_ranks_agree_where_one_is_in_more_groups(pool2):
    assert pool2.run(in_one_group_more) == [[1], [1]]
