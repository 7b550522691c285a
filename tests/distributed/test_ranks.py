"""What ranks measure and find together, against one process that has everything."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distributed.loops import Split
from every import every
from halfstep.errors import PrecisionError
from halfstep.precision.agreement import MARK, ManyRanks
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.scaling.gradients import OneRank, Share, exact_global_norm, global_norm

CPU = torch.device("cpu")
pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


def drawn(seed, *shape, size=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def measured(rank, kind, size, ranks, share=None):
    """Loss and norm of gradients that lie over the ranks in several ways; they differ by size."""
    whole = {1: drawn(1, 8, 4, size=size), 2: drawn(2, 8, 4, size=size)}
    all_of, part, half = Share(), Share(ranks, rank), Share(2, rank % 2)
    held = {
        "copies": {all_of: [whole[1], whole[2]]},
        "parts": {part: [whole[1].chunk(ranks)[rank], whole[2].chunk(ranks)[rank]]},
        "both": {all_of: [whole[1]], part: [whole[2].chunk(ranks)[rank]]},
        "halves": {all_of: [whole[1]], half: [whole[2].chunk(2)[rank % 2]]},
        "uneven": {all_of: [whole[1]], part: [whole[2] if rank == 0 else torch.empty(0, 4)]},
        "none here": {all_of: [whole[1]], part: [whole[2]] if rank == 0 else []},
    }[kind]
    loss = torch.tensor(1.5 + rank)
    return ManyRanks(CPU, loss_share=share).measure(
        loss, held, exact_global_norm if size > 1e10 or size < 1e-10 else global_norm
    )


KINDS = ("copies", "parts", "both", "halves", "uneven", "none here")


def test_the_norm_is_that_of_the_whole_however_it_lies(pool):
    def check(kind, size):
        found = pool.run(measured, kind=kind, size=size, ranks=pool.size)
        assert len(set(found)) == 1  # every rank takes the same branches
        exact = math.sqrt(sum(drawn(s, 8, 4, size=size).double().square().sum() for s in (1, 2)))
        # a norm of 32 to 64 numbers in fp32: its squares' sum and its root, a few units of 2^-24
        assert found[0][1] == pytest.approx(exact, rel=8 * 2.0**-24)
        assert found[0][0] == sum(1.5 + rank for rank in range(pool.size)) / pool.size
        if kind == "copies" and size == 1.0:
            whole = {Share(): [drawn(1, 8, 4), drawn(2, 8, 4)]}
            one = OneRank().measure(torch.zeros(()), whole, global_norm)
            assert found[0][1] == one[1]  # a square of fp32 fits into fp64, and sums over copies

    every(itertools.product(KINDS, (1.0, 1e30, 1e-30)), check)


def broken(rank, where, value):
    gradients = [torch.ones(3), torch.ones(2)]
    loss = torch.tensor(1.0)
    if rank == 1:
        if where == "loss":
            loss = torch.tensor(value)
        else:
            gradients[0][1] = value
    return ManyRanks(CPU).measure(loss, {Share(): gradients}, global_norm)


def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(pool2):
    def check(where, value):
        for loss, norm in pool2.run(broken, where=where, value=value):
            assert math.isfinite(loss) == (where == "gradient")
            assert math.isfinite(norm) == (where == "loss")

    every(itertools.product(("loss", "gradient"), (math.nan, math.inf, -math.inf)), check)


# Layers split by hand: Megatron's column- and row-parallel pair over two ranks


def split_norm(rank, ranks, marked, model_parallel):
    model = Split(rank, ranks, drawn(1, 8, 6), drawn(2, 5, 8), marked=marked)
    loss = model(drawn(3, 4, 6)).square().mean()
    loss.backward()
    group = ManyRanks(CPU, model_parallel=model_parallel)
    held = {}
    for parameter in model.parameters():
        held.setdefault(group.share_of(parameter), []).append(parameter.grad)
    return group.measure(loss.detach(), held, global_norm)[1]


def whole_norm():
    """One process with the whole model, in fp64."""
    norm = nn.LayerNorm(6, dtype=torch.float64)
    up, down = drawn(1, 8, 6).double(), drawn(2, 5, 8).double()
    up.requires_grad_()
    down.requires_grad_()
    x = drawn(3, 4, 6).double()
    F.linear(F.gelu(F.linear(norm(x), up)), down).square().mean().backward()
    every = (*norm.parameters(), up, down)
    return math.sqrt(sum(p.grad.square().sum().item() for p in every))


@pytest.mark.parametrize("model_parallel", [None, 2])
def test_marked_parts_of_layers_split_by_hand_give_the_norm_of_the_whole(pool2, model_parallel):
    first, second = pool2.run(split_norm, ranks=2, marked=True, model_parallel=model_parallel)
    # fp32 gradients of a few dozen terms against fp64
    assert first == second == pytest.approx(whole_norm(), rel=1e-5)


def marks(rank, model_parallel):
    plain, marked = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    setattr(marked, MARK, True)
    group = ManyRanks(CPU, model_parallel=model_parallel)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return [group.share_of(p).parts for p in (plain, marked, model.weight)]


@pytest.mark.parametrize(("model_parallel", "parts"), [(None, 4), (2, 2), (1, 1)])
def test_a_mark_tells_that_model_parallel_ranks_hold_parts(pool4, model_parallel, parts):
    assert pool4.run(marks, model_parallel=model_parallel) == [[1, parts, 4]] * 4


def refused(rank, case):
    """The message of the check, or None."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    group = ManyRanks(CPU)
    with torch.no_grad():
        if case == "one bit":
            model[1].weight.view(torch.int32)[1, 1] += rank
        elif case in ("split", "marked", "frozen"):
            model[1].bias.add_(rank)
            setattr(model[1].bias, MARK, case == "marked")
            model[1].bias.requires_grad_(case != "frozen")
        elif case == "shape":
            model[1].bias = nn.Parameter(torch.zeros(2 + rank))
        elif case == "16 bits":
            model.bfloat16()
        elif case == "names" and rank:
            model[1].gain = nn.Parameter(torch.ones(1))
        elif case == "complex":
            model[1].phase = nn.Parameter(torch.full((2,), 1j * rank))
        elif case == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            assert local_part(model[0].weight).shape == (2, 3)
        elif case == "empty":
            model = nn.Module()
    try:
        group.bound(model.named_parameters())
    except PrecisionError as error:
        return str(error)
    return None


def test_plain_parameters_must_be_copies_or_marked(pool2):
    wrong = {
        "one bit": "1.weight differs from rank to rank",
        "split": "1.bias differs from rank to rank",
        "shape": "the ranks' models have different parameters",
        "complex": "1.phase differs from rank to rank",
        "names": "the ranks' models have different parameters",
    }

    def check(case):
        first, second = pool2.run(refused, case=case)
        assert first == second
        assert first.startswith(wrong[case]) if case in wrong else first is None
        if case == "split":
            for words in ("parameter.tensor_model_parallel = True", "ranks=", "broadcast"):
                assert words in first

    right = ("copies", "marked", "frozen", "16 bits", "sharded", "empty")
    every((*wrong, *right), check)
