"""Do the ranks still train the same model? Compared now and then, in one collective.

Ranks that have once stepped differently stay different for good, and nothing else shows it: losses
go on falling. Every rank makes a row of whole numbers: steps, loss scale, and for every parameter
the sum of its bits, and which part of it the rank holds. Ranks that hold the same part must have
the same sum.
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
    """Stop a run whose ranks have parted ways. All ranks together.

    Args:
        precision: Its loss scale and counts are compared.
        model: Its parameters are compared where ranks hold copies of the same part.
        layout: Of all ranks of the default group, or its spelling.
        step: Steps taken.
        when: For the message: ``"before the first step"``.

    Raises:
        PrecisionError: The same on every rank: which rank differs from which, and in what. Or for
            what is no Precision or no model.
        ConfigError: For what is no layout.
    """
    layout = Layout.of(layout)
    require(precision, Precision, "check_agreement(precision)", "a halfstep.Precision")
    require_model(model, "check_agreement(model)")
    if layout.size == 1:
        return
    reshard_(model)  # what is gathered is whole on every rank
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
    """The sum of a tensor's bits, read as whole numbers; the wrapped 64-bit sum of all elements."""
    words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))


def _part_number(weight: Tensor) -> int:
    """Which part this rank holds: its place on those axes of the mesh that split the weight."""
    if not is_sharded(weight):
        return 0
    dtensor: Any = weight
    mesh = dtensor.device_mesh
    number = 0
    for size, place, how in zip(mesh.shape, mesh.get_coordinate(), dtensor.placements, strict=True):
        if how.is_shard():
            number = number * size + place
    return number
