"""16-bit sums in two levels, within machines and between them, against their definition."""

from __future__ import annotations

import pytest
import torch

from distributed.reduction import (
    BIG,
    reduced,
    share,
    unpacked,
)
from distributed.test_gradient_reducer import (
    branch_shares,
    branches,
    definition,
    given,
    kept_as,
    same_on_all,
)
from every import every
from halfstep.distributed.data.reducer import neighbours
from halfstep.errors import PrecisionError

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


def in_two_levels(parts, reduce, kept=torch.float32):
    """The sum over machines of two, in 16 bits, of what each machine's sum is in 16 bits."""
    machines = [definition(parts[first : first + 2], reduce) for first in range(0, len(parts), 2)]
    return definition(machines, reduce, kept)


NEIGHBOURS = [
    (range(4), 2, [[2, 3], [1, 3]]),
    (range(8), 4, [[4, 5, 6, 7], [3, 7]]),
    (range(1, 16, 2), 8, [[9, 11, 13, 15], [7, 15]]),  # the data ranks of data=8,tensor=2
    (range(8, 32), 8, [[24, 25, 26, 27, 28, 29, 30, 31], [15, 23, 31]]),
    (range(4), 1, None),
    (range(4), 4, None),
    (range(4), 8, None),
    (range(0, 16, 8), 8, None),  # data=2,tensor=8
    (range(6), 4, None),
    ([0, 2, 1, 3], 2, None),
]
"""Data ranks, ranks of a machine, and the levels of the last rank's sums where there are two."""


def test_who_adds_with_whom():
    def check(ranks, per_machine, levels_of_last):
        found = neighbours(ranks, ranks[-1], per_machine)
        assert found == (levels_of_last or [[*ranks]])

    every(NEIGHBOURS, check)


@pytest.mark.parametrize("policy", ["fp32", "bf16-split", "bf16-pure"])
@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
def test_two_machines_of_two_ranks(pool4, policy, reduce):
    shares = [share(policy, rank) for rank in range(4)]
    kept = kept_as(policy, reduce)
    for size in (1, 700, BIG):
        found = pool4.run(
            reduced, policy=policy, reduce=reduce, bucket_bytes=size, steps=2, ranks_per_machine=2
        )
        same_on_all(found)
        for name, (dtype, numbers) in found[0].items():
            expected = in_two_levels([s[name] for s in shares], reduce, kept)
            assert dtype == str(kept), name
            assert torch.equal(torch.from_numpy(numbers), expected.float()), name


@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
def test_numbers_of_all_sizes_are_added_by_rank_and_by_machine(pool4, reduce):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4, 1000, generator=generator)
    values *= 2.0 ** torch.randint(-30, 15, (4, 1000), generator=generator)
    expected = in_two_levels(list(values), reduce)
    assert not torch.equal(definition(list(values), reduce), expected)
    assert not torch.equal(in_two_levels(list(values[[0, 2, 1, 3]]), reduce), expected)
    for numbers, sent, counted in pool4.run(
        given, values=values.tolist(), reduce=reduce, ranks_per_machine=2
    ):
        assert torch.equal(torch.tensor(numbers), expected)
        size = sent["all_to_all_single"][0]
        # within the machine the whole, between machines this rank's half, and back
        assert list(sent.values()) == [[size, size // 2], [size // 2, size]]
        assert counted == 2 * (size // 2 + size // 2 // 2) == 2 * 3 * size // 4


def test_the_launchers_environment_is_read_and_must_agree(pool4):
    shares = [share("fp32", rank) for rank in range(4)]
    for sizes, expected in (([2] * 4, in_two_levels), ([2, 2, 1, 1], definition)):
        found = pool4.run(as_torchrun, sizes=sizes)
        same_on_all(found)
        for name, got in unpacked(found[0]).items():
            assert torch.equal(got, expected([s[name] for s in shares], "bf16")), name


def as_torchrun(rank, sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(sizes[rank]))
        return reduced(rank, policy="fp32", reduce="bf16")


def test_fewer_ranks_than_one_is_refused(pool2):
    for message in pool2.run(refused):
        assert message == "ranks_per_machine=0; allowed: integers >= 1"


def refused(rank):
    try:
        reduced(rank, policy="fp32", reduce="bf16", ranks_per_machine=0)
    except PrecisionError as error:
        return str(error)
    return ""


def test_phases_are_launched_in_one_order_within_backward(pool4):
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 0, 1]]
    answers = pool4.run(branches, orders=orders, reduce="bf16", ranks_per_machine=2)
    assert len({tuple(calls) for _, calls, _, _ in answers}) == 1
    found = [grads for *_, grads in answers]
    same_on_all(found)
    _, calls, during, _ = answers[0]
    # 12 parameters, a bucket each; those of the first 9 are launched as later ones start
    assert len(calls) == 12 * 4
    assert during == 9 * 4 + 3 + 2 + 1
    shares = branch_shares(orders)
    for name, got in unpacked(found[0]).items():
        assert torch.equal(got, in_two_levels([s[name] for s in shares], "bf16")), name
