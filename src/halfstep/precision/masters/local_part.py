"""This rank's part of a sharded parameter, as the plain tensor that the optimizer updates.

FSDP2 and tensor parallelism store a parameter as a DTensor: a global shape, and a part on every
rank. An update is element-wise, so a rank can apply it to its part alone, with any optimizer, any
rounding mode and any kernel. It also avoids mixed lists of DTensors and plain tensors, which
torch's foreach and fused optimizers and its clipping refuse. A part is a plain parameter over the
memory of the DTensor's local tensor.

A DTensor is recognised by its attributes, since importing ``torch.distributed.tensor`` takes
longer than the rest of halfstep.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_WHOLE = "halfstep_whole"


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: sharded, or replicated over a mesh."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank, detached, in the same memory; or the plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def as_target(local: Tensor, parameter: Tensor) -> nn.Parameter:
    """A plain parameter for an optimizer, over ``local``, that knows the one it stands for.

    The optimizers that need whole tensors ask for it by :func:`whole_of`.
    """
    target = nn.Parameter(local, parameter.requires_grad)
    setattr(target, _WHOLE, parameter)
    return target


def whole_of(target: Tensor) -> Tensor:
    """The parameter that a target of :func:`as_target` stands for; another tensor itself."""
    whole: Tensor = getattr(target, _WHOLE, target)
    return whole


def parts_of(tensor: Tensor) -> int:
    """How many ranks hold different parts of a tensor: 1 for a plain or replicated one."""
    if not is_sharded(tensor):
        return 1
    dtensor: Any = tensor
    pairs = zip(dtensor.device_mesh.shape, dtensor.placements, strict=True)
    return math.prod(size for size, placement in pairs if placement.is_shard())


def local_gradient(weight: Tensor) -> Tensor | None:
    """A finished gradient's part on this rank, in the same memory.

    A gradient placed differently from its weight, such as a partial sum, is redistributed first
    and stays so. That is a collective: all ranks must ask for the same weight at the same time.
    """
    gradient: Any = weight.grad
    if gradient is None or not is_sharded(gradient):
        return weight.grad
    placements = weight.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        weight.grad = gradient = gradient.redistribute(placements=placements)
    return local_part(gradient)


def fsdp_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that ``fully_shard`` (FSDP2) was called on, by name, with FSDP2's state."""
    for name, module in model.named_modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if callable(state_of):
            yield name, state_of()


def reshard_(model: nn.Module) -> None:
    """Drop weights that FSDP2 still holds gathered after a forward without a backward.

    They are copies that no update reaches; they replace the sharded parameters, and the next
    forward would use them as they are.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for name, _ in fsdp_modules(model):
        modules[name].reshard()


def place_like(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part as a DTensor placed like ``parameter``; unchanged if that is plain."""
    if not is_sharded(parameter):
        return local
    dtensor: Any = parameter
    whole: Tensor = type(dtensor).from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
    return whole


def whole_like(local: Tensor, parameter: Tensor) -> Tensor:
    """The whole of a tensor that is split over ranks as a DTensor is; all of them must ask."""
    placed: Any = place_like(local, parameter)
    whole: Tensor = placed.full_tensor()
    return whole


def part_like(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor, split as the parameter is; all if that is no DTensor."""
    if not is_sharded(parameter):
        return full
    dtensor: Any = parameter
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor  # it made the parameter
    mesh, placements = dtensor.device_mesh, dtensor.placements
    part: Tensor = distribute(full, mesh, placements, src_data_rank=None).to_local()
    return part.clone()  # a slice would keep the memory of the whole tensor alive
