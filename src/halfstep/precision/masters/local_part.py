"""What this rank holds of a sharded parameter: the plain tensor that the optimizer updates.

FSDP2 and tensor parallelism store a parameter as DTensor: a global shape, and on every rank a part.
An update is element by element, so a rank can take it on its part alone, with any optimizer, any
way of keeping masters and any kernel; mixed lists of DTensors and plain tensors, which torch's
foreach and fused optimizers and its clipping refuse, never come about. A part is a plain parameter
over the memory of the DTensor's local tensor.

A DTensor is known here by what it can do, since importing ``torch.distributed.tensor`` takes longer
than the rest of halfstep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: sharded, or replicated over a mesh."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank, detached, in the same memory; a plain tensor is itself."""
    if not is_sharded(tensor):
        return tensor
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def parts_of(tensor: Tensor) -> int:
    """How many ranks hold different parts of it: 1 for a plain or replicated tensor."""
    if not is_sharded(tensor):
        return 1
    dtensor: Any = tensor
    pairs = zip(dtensor.device_mesh.shape, dtensor.placements, strict=True)
    return math.prod(size for size, placement in pairs if placement.is_shard())


def local_gradient(weight: Tensor) -> Tensor | None:
    """A finished gradient's part on this rank, in the same memory.

    One that is placed otherwise than its weight, as a partial sum, is brought there first and
    stays there. Every rank must ask for the same weight at the same time.
    """
    gradient: Any = weight.grad
    if gradient is None or not is_sharded(gradient):
        return weight.grad
    placements = weight.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        weight.grad = gradient = gradient.redistribute(placements=placements)
    return local_part(gradient)


def fsdp_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that ``fully_shard`` (FSDP2) was called on, by name, and its state of each."""
    for name, module in model.named_modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if callable(state_of):
            yield name, state_of()


def reshard_(model: nn.Module) -> None:
    """Drop weights that FSDP2 still holds gathered from a forward without a backward.

    They are copies that no update reaches, stand in the sharded parameters' places, and the next
    forward would take them as they are.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for name, _ in fsdp_modules(model):
        modules[name].reshard()


def place_like(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is placed as a parameter is; a plain one is itself."""
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
