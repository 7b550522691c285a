"""This rank's part of a sharded parameter, as the plain tensor that the optimizer updates.

FSDP2 and tensor parallelism store a parameter as a DTensor: a global shape, and a part on every
rank. An update is element-wise, so a rank can apply it to its part alone, with any optimizer, any
rounding mode and any kernel. It also avoids mixed lists of DTensors and plain tensors, which
torch's foreach and fused optimizers and its clipping refuse. A part is a plain parameter over the
memory of the DTensor's local tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.distributed.tensor import DTensor, distribute_tensor

_WHOLE = "halfstep_whole"


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: sharded, or replicated over a mesh."""
    return isinstance(tensor, DTensor)


def is_divided(tensor: Tensor) -> bool:
    """Whether several ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    placed = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in placed)


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank, detached, in the same memory; or the plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    detached: Any = tensor.detach()
    local: Tensor = detached.to_local()
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


def local_gradient(weight: Tensor) -> Tensor | None:
    """A finished gradient's part on this rank, in the same memory.

    A gradient placed differently from its weight, such as a partial sum, is redistributed first
    and stays so. That is a collective: all ranks must ask for the same weight at the same time.
    """
    gradient = weight.grad
    if not isinstance(gradient, DTensor) or not isinstance(weight, DTensor):
        return gradient
    if gradient.placements != weight.placements:
        weight.grad = gradient = gradient.redistribute(placements=weight.placements)
    return local_part(gradient)


def fsdp_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that ``fully_shard`` (FSDP2) was called on, by name, with FSDP2's state."""
    for name, module in model.named_modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if callable(state_of):
            yield name, state_of()


def fsdp_parameters(model: nn.Module) -> dict[Tensor, Any]:
    """What FSDP2 keeps of each sharded parameter, by the parameter."""
    return {
        kept.sharded_param: kept for _, group in fsdp_groups(model) for kept in group.fsdp_params
    }


def fsdp_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each state of FSDP2 with each of its groups of parameters, which are gathered together.

    Torch before 2.13 has at most one a module.
    """
    for _, state in fsdp_modules(model):
        several = getattr(state, "_fsdp_param_groups", None)
        for group in several if several is not None else [state._fsdp_param_group]:
            if group is not None:
                yield state, group


def cast_(parameter: nn.Parameter, dtype: torch.dtype, sharded: Mapping[Tensor, Any]) -> None:
    """Cast a parameter in place, which stays the same object with the same attributes.

    What FSDP2 keeps of it, in ``sharded`` of :func:`fsdp_parameters`, is brought up to date.
    """
    value: Any = parameter.detach().to(dtype)
    parameter.data = value
    if isinstance(parameter, DTensor):  # whose part an assignment to ``data`` leaves as it was
        parameter._local_tensor, parameter._spec = value._local_tensor, value._spec
    if parameter in sharded:
        kept = sharded[parameter]
        kept.reset_sharded_param()
        kept.all_gather_outputs.clear()  # of a forward before the cast
        kept.__dict__.pop("_unsharded_param", None)


def sum_in_(model: nn.Module, dtype: torch.dtype) -> None:
    """Make FSDP2 sum gradients in a dtype, where its ``MixedPrecisionPolicy`` names none."""
    for state, group in fsdp_groups(model):
        if group.mp_policy.reduce_dtype is None:
            state._mp_policy = group.mp_policy = replace(group.mp_policy, reduce_dtype=dtype)
        group._init_mp_dtypes()


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
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_value(value: Any, parameter: Tensor) -> Any:
    """A value of a parameter's optimizer state, as a step on the parameter's local part needs it.

    What is placed otherwise than the parameter, as it was loaded, is redistributed: a collective.
    """
    if not isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.placements != parameter.placements:
        value = value.redistribute(parameter.device_mesh, parameter.placements)
    return local_part(value)


def part_like(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor, split as the parameter is; all if that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return part.clone()  # a slice would keep the memory of the whole tensor alive


def dense(tensor: Tensor) -> Tensor:
    """The values that a tensor stores on this rank."""
    to_local = getattr(tensor, "to_local", None)  # of a distributed tensor
    tensor = tensor if to_local is None else to_local()
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.is_nested or tensor.layout != torch.strided:
        tensor = tensor.values()
    return tensor


def storage_key(tensor: Tensor) -> int:
    """An id of the storage of a tensor; views share their base's."""
    key: int = dense(tensor).untyped_storage()._cdata
    return key


def runs(tensors: Sequence[Tensor], most: int) -> Iterator[slice]:
    """Neighbours of one dtype that have at most ``most`` elements together; a larger one alone.

    One call for a run costs the host as much as one for a tensor.
    """
    start, size = 0, 0
    for end, tensor in enumerate(tensors):
        size += tensor.numel()
        if end > start and (size > most or tensor.dtype is not tensors[start].dtype):
            yield slice(start, end)
            start, size = end, tensor.numel()
    if tensors:
        yield slice(start, len(tensors))


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of these, one after the other; a contiguous one alone is not copied."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor with the shapes of these, one after the other."""
    parts = torch.split(
        flat, [*map(Tensor.numel, tensors)]
    )  # torch's own loses the shape of empty ones
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
