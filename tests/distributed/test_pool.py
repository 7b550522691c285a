"""The worker pool itself: results by rank, failures of any rank, and life after one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed


def add(rank, number):
    total = torch.tensor([rank + number])
    dist.all_reduce(total)
    return rank, int(total)


def fail_on_rank_1(rank):
    if rank == 1:
        raise ValueError("this one")
    return rank


def test_results_come_by_rank_and_collectives_work(pool2):
    assert pool2.run(add, number=5) == [(0, 11), (1, 11)]


def test_a_failure_names_its_rank_and_the_pool_goes_on(pool2):
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*ValueError: this one"):
        pool2.run(fail_on_rank_1)
    assert pool2.run(add, number=1) == [(0, 3), (1, 3)]
