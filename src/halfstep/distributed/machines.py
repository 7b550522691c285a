"""Which ranks of a group are on one machine, for sums in two levels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from halfstep.errors import PrecisionError


def neighbours(ranks: Sequence[int], rank: int, per_machine: int) -> list[list[int]]:
    """Whom a rank adds with.

    Args:
        ranks: Of the group, by their numbers in the run.
        rank: One of them.
        per_machine: Ranks of the run on every machine, numbered machine by machine.

    Returns:
        The group's ranks on its machine, and those with its place on every machine. All ranks
        where these are no two levels: a machine has one or all of them, or not as many as others,
        or the group has an order of its own.
    """
    machines = [[*own] for _, own in groupby(ranks, lambda other: other // per_machine)]
    count = len(machines[0])
    uneven = any(len(own) != count for own in machines)
    if len(machines) == 1 or count == 1 or uneven or [*ranks] != sorted(ranks):
        return [[*ranks]]
    inside = next(own for own in machines if rank in own)
    place = inside.index(rank)
    return [inside, [own[place] for own in machines]]


def split_by_machine(
    group: dist.ProcessGroup, ranks_per_machine: int | None, device: torch.device
) -> list[dist.ProcessGroup]:
    """The levels of a sum over the group: within machines and between them, or the group alone.

    All ranks of the group together; with NCCL and a ``device_id`` in ``init_process_group``, whose
    communicators are split from one, all ranks of the run, each in its group.

    Args:
        group: The ranks that add.
        ranks_per_machine: See :func:`neighbours`; None: what torchrun says, or else 1. Where ranks
            differ in it there is one level.
        device: Of the buffers, whose timeout the new groups take.

    Raises:
        PrecisionError: If it is below 1.
    """
    if ranks_per_machine is None:
        ranks_per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks_per_machine < 1:
        raise PrecisionError(f"ranks_per_machine={ranks_per_machine}; allowed: integers >= 1")
    table = torch.tensor([ranks_per_machine, -ranks_per_machine], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    most, least = table.tolist()
    ranks = dist.get_process_group_ranks(group)
    levels = neighbours(ranks, dist.get_rank(), ranks_per_machine)
    if most != -least or len(levels) == 1:
        return [group]
    backend: Any = group._get_backend(device)
    return [
        dist.new_group(
            level,
            timeout=backend.options._timeout,
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
        for level in levels
    ]
