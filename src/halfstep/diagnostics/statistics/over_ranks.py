"""The statistics of all ranks as those of one model.

Activations and their gradients belong to different samples, or to different parts of layers, so
their counts add up. A parameter may be whole on every rank, and is then counted once; or ranks hold
parts of it, which add up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from halfstep.diagnostics.statistics.values import TensorStatistics, merged
from halfstep.precision.agreement import ManyRanks
from halfstep.precision.scaling.gradients import Ranks

_OF_PARAMETERS = ("weight", "gradient", "update")


def over_ranks(
    tensors: Sequence[TensorStatistics],
    parts_of: Callable[[str], int],
    ranks: Ranks,
    device: torch.device,
) -> list[TensorStatistics]:
    """Merge the statistics of all ranks, which call it together; they are complete on rank 0 alone.

    They travel as text in a tensor, so that nothing is unpickled, and ranks may have counted
    different tensors.

    Args:
        tensors: This rank's.
        parts_of: How many ranks hold different parts of a parameter, by its name.
        ranks: Those of the step; only :class:`ManyRanks` of torch's default group are merged.
        device: Where the group's backend communicates.
    """
    if not isinstance(ranks, ManyRanks):
        return list(tensors)
    size, here = dist.get_world_size(), dist.get_rank()
    rows = []
    for one in tensors:
        parts = parts_of(one.name) if one.kind in _OF_PARAMETERS else size
        rows.append(one.to_dict() | {"parts": parts})
    text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8).to(device)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    lengths[here] = len(text)
    dist.all_reduce(lengths)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    gathered = [torch.empty_like(padded) for _ in range(size)] if here == 0 else None
    dist.gather(padded, gathered)
    if gathered is None:
        return list(tensors)
    found: dict[tuple[str, str, str], list[TensorStatistics]] = {}
    shares: dict[tuple[str, str, str], float] = {}
    for part, length in zip(gathered, lengths.tolist(), strict=True):
        for row in json.loads(bytes(part[:length].tolist())):
            one = TensorStatistics.from_dict(row)
            key = (one.kind, one.name, one.dtype)
            found.setdefault(key, []).append(one)
            shares[key] = int(row["parts"]) / size
    return [merged(same, shares[key]) for key, same in found.items()]
