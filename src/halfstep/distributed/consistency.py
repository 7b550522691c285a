"""Checks now and then, in one collective, that all ranks still train the same model.

Ranks that have once stepped differently stay different for good, and nothing else shows it: losses
go on falling. Every rank makes a row of integers: steps, loss scale, and for every parameter the
sum of its bits and which part of it the rank holds. Ranks that hold the same part must have the
same sum.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.layout import Layout
from halfstep.errors import PrecisionError
from halfstep.precision.border import require, require_model
from halfstep.precision.masters.local_part import is_sharded, local_part, reshard_
from halfstep.precision.step import Precision

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_agreement(
    precision: Precision, model: nn.Module, layout: str | Layout, *, step: int, when: str = ""
) -> None:
    """Raise if the ranks no longer train the same model; all ranks call it together.

    Args:
        precision: Its loss scale and counts are compared.
        model: Its parameters are compared where ranks hold copies of the same part.
        layout: The layout of all ranks of the default group, or its spelling.
        step: Steps taken.
        when: When this is, for the message: ``"before the first step"``.

    Raises:
        PrecisionError: On every rank, naming the ranks that differ, and in what; or if an argument
            is not a Precision or a model.
        ConfigError: If ``layout`` is not a layout.
    """
    layout = Layout.of(layout)
    require(precision, Precision, "check_agreement(precision)", "a halfstep.Precision")
    require_model(model, "check_agreement(model)")
    if layout.size == 1:
        return
    reshard_(model)  # compare the parts, not weights that are still gathered
    weights = dict(model.named_parameters())
    names = ["the step count", "the applied steps", "the loss scale", *weights]
    scale = struct.unpack("<q", struct.pack("<d", precision.loss_scale.value))[0]
    sums = [checksum(local_part(weight)) for weight in weights.values()]
    parts = [0, 0, 0, *map(_part_number, weights.values())]
    numbers = [step, precision.applied_total, scale, *sums]
    row = torch.tensor([numbers, parts], device=precision.device)
    rows = [torch.empty_like(row) for _ in range(layout.size)]
    dist.all_gather(rows, row)
    table = [found.tolist() for found in rows]
    for column, name in enumerate(names):
        first: dict[int, int] = {}  # part to the first rank that holds it
        for rank, (found, held) in enumerate(table):
            other = first.setdefault(held[column], rank)
            if found[column] != table[other][0][column]:
                told = f"{name} ({table[other][0][column]} and {found[column]})"
                what = told if column < 2 else name
                raise PrecisionError(
                    f"rank {rank} differs from rank {other} in {what}"
                    f"{' ' + when if when else f' after step {step}'}: ranks that hold copies of "
                    "one model have parted ways, and no later step can mend it; go on from the "
                    "last checkpoint with --resume, and look for memory or network faults, or for "
                    "code that changes weights on some ranks only"
                )


def checksum(tensor: Tensor) -> int:
    """Sum a tensor's elements, with their bits read as integers, in wrapping 64-bit arithmetic."""
    words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))


def _part_number(weight: Tensor) -> int:
    """Number the part that this rank holds, by its coordinate on the mesh axes that split it."""
    if not is_sharded(weight):
        return 0
    dtensor: Any = weight
    mesh = dtensor.device_mesh
    number = 0
    for size, place, how in zip(mesh.shape, mesh.get_coordinate(), dtensor.placements, strict=True):
        if how.is_shard():
            number = number * size + place
    return number
