"""Parts of whole tensors. A file of its own, as importing DTensor takes half as long as torch."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def part_like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a tensor, split as the parameter is; all if that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, placements = parameter.device_mesh, parameter.placements
    part: Tensor = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return part.clone()  # a slice would keep the memory of the whole tensor alive
