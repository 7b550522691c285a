"""Parts of whole tensors; apart, since importing DTensor takes half as long as importing torch."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def part_like(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, placed as a parameter is; all of it if that is plain."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, placements = parameter.device_mesh, parameter.placements
    part: Tensor = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return part.clone()  # a slice would keep all of it
