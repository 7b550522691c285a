"""What ranks find together. Norms on any mesh: ``test_agreement.py``."""

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
from halfstep.precision.scaling.gradients import Share, exact_global_norm, global_norm

CPU = torch.device("cpu")
pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def broken(rank, where, value):
    gradients = [torch.ones(3), torch.ones(2)]
    loss = torch.tensor(1.0)
    if rank == 1:
        if where == "loss":
            loss = torch.tensor(value)
        else:
            gradients[0][1] = value
    norm = exact_global_norm if value == 1e30 else global_norm
    return ManyRanks(CPU).measure(loss, {Share(): gradients}, norm)


def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(pool2):
    def check(where, value):
        for loss, norm in pool2.run(broken, where=where, value=value):
            assert math.isfinite(loss) == (where == "gradient")
            assert math.isfinite(norm) == (where == "loss")

    every(itertools.product(("loss", "gradient"), (math.nan, math.inf, -math.inf)), check)
    # copies, whose squares of 1e60 and 5 are averaged beyond the range of fp32
    norms = [norm for _, norm in pool2.run(broken, where="gradient", value=1e30)]
    assert norms == pytest.approx([1e30 / math.sqrt(2)] * 2, rel=2.0**-23)


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
