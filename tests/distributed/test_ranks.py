"""What ranks measure and find together, against one process that has everything."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep.precision.gradients import NonFinite, exact_global_norm, global_norm
from halfstep.precision.ranks import ManyRanks, OneRank, ranks_of_this_process

CPU = torch.device("cpu")
pytestmark = pytest.mark.distributed


def drawn(seed, *shape, size=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def measured(rank, kind, size, ranks, share=None):
    """Loss and norm of gradients that lie over the ranks in several ways; they differ by size."""
    whole = {1: drawn(1, 8, 4, size=size), 2: drawn(2, 8, 4, size=size)}
    held = {
        "copies": {1: [whole[1], whole[2]]},
        "parts": {ranks: [whole[1].chunk(ranks)[rank], whole[2].chunk(ranks)[rank]]},
        "both": {1: [whole[1]], ranks: [whole[2].chunk(ranks)[rank]]},
        "halves": {1: [whole[1]], 2: [whole[2].chunk(2)[rank % 2]]},
        "uneven": {1: [whole[1]], ranks: [whole[2] if rank == 0 else torch.empty(0, 4)]},
        "none here": {1: [whole[1]], ranks: [whole[2]] if rank == 0 else []},
    }[kind]
    loss = torch.tensor(1.5 + rank)
    return ManyRanks(CPU, loss_share=share).measure(
        loss, held, exact_global_norm if size > 1e10 or size < 1e-10 else global_norm
    )


KINDS = ("copies", "parts", "both", "halves", "uneven", "none here")


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_norm_is_that_of_the_whole_however_it_lies(request, ranks, kind, size):
    pool = request.getfixturevalue(f"pool{ranks}")
    found = pool.run(measured, kind=kind, size=size, ranks=ranks)
    assert len(set(found)) == 1  # every rank takes the same branches
    exact = math.sqrt(sum(drawn(s, 8, 4, size=size).double().square().sum().item() for s in (1, 2)))
    # a norm of 32 to 64 numbers in fp32: its squares' sum and its root, a few units of 2^-24
    assert found[0][1] == pytest.approx(exact, rel=8 * 2.0**-24)
    assert found[0][0] == sum(1.5 + rank for rank in range(ranks)) / ranks
    if kind == "copies" and size == 1.0:
        one = OneRank().measure(torch.zeros(()), {1: [drawn(1, 8, 4), drawn(2, 8, 4)]}, global_norm)
        assert found[0][1] == one[1]  # a square of fp32 fits into fp64, and its sums over copies


def test_a_share_of_the_loss_is_what_it_counts(pool2):
    found = pool2.run(measured, kind="copies", size=1.0, ranks=2, share=1.0)
    assert [loss for loss, _ in found] == [4.0, 4.0]


def broken(rank, where, value):
    gradients = [torch.ones(3), torch.ones(2)]
    loss = torch.tensor(1.0)
    if rank == 1:
        if where == "loss":
            loss = torch.tensor(value)
        else:
            gradients[0][1] = value
    return ManyRanks(CPU).measure(loss, {1: gradients}, global_norm)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(pool2, where, value):
    for loss, norm in pool2.run(broken, where=where, value=value):
        assert math.isfinite(loss) == (where == "gradient")
        assert math.isfinite(norm) == (where == "loss")


def opposite(rank):
    return ManyRanks(CPU).measure(torch.tensor(math.inf if rank else -math.inf), {}, global_norm)


def test_infinities_do_not_cancel(pool2):
    assert all(math.isnan(loss) for loss, _ in pool2.run(opposite))


def found_by(rank, marks, names):
    return ManyRanks(CPU).union(NonFinite(*marks[rank]), names)


@pytest.mark.parametrize(
    ("marks", "nan", "inf"),
    [
        ([((), ()), ((), ())], (), ()),
        ([((), ()), ((), ("b",))], (), ("b",)),
        ([(("a",), ()), ((), ("b",))], ("a",), ("b",)),
        ([((), ("a",)), (("a",), ())], ("a",), ()),  # NaN in one part, inf in another
        ([((), ("c", "a")), ((), ("b",))], (), ("a", "b", "c")),  # in the order of the names
    ],
)
def test_a_find_of_any_rank_is_everybodys(pool2, marks, nan, inf):
    for found in pool2.run(found_by, marks=marks, names=["a", "b", "c"]):
        assert (found.nan, found.inf) == (nan, inf)


def test_of_no_names_nothing_is_found(pool2):
    """A model without floating buffers."""
    assert pool2.run(found_by, marks=[((), ())] * 2, names=[]) == [NonFinite((), ())] * 2


def worst(rank):
    return ManyRanks(CPU).worst([rank, -rank, 5 - 3 * rank, -24 - rank])


def test_the_worst_is_the_largest_place_by_place(pool4):
    assert pool4.run(worst) == [[3, 0, 5, -24]] * 4


def default(rank):
    return type(ranks_of_this_process(CPU)).__name__


def test_several_processes_agree_by_default_and_one_has_nobody_to_ask(pool2):
    assert pool2.run(default) == ["ManyRanks"] * 2
    assert isinstance(ranks_of_this_process(CPU), OneRank)
