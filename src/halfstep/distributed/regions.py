"""Collectives at the borders of tensor-parallel regions, each with its transpose in backward.

Outside of a region every rank of the tensor axis holds the same activations; inside, each rank
holds its own part of the features. These functions cross a border:

    function            forward                     backward
    copy_to             identity                    sum over ranks
    reduce_from         sum over ranks              identity
    gather_replicated   gather the parts of a dim   keep own part

The first two enter and leave regions. The last one feeds work that every rank computes alike,
whose gradient is therefore complete on every rank and must not be summed.

Sums of 16-bit tensors are sent in 16 bits, added in fp32 in the order of the ranks and rounded
once. Every sum has the same bits on all ranks, so that replicated parameters never diverge.

Shapes: R is the dim over ranks.

**Source:** Shoeybi et al. 2019, "Megatron-LM", §3 (f and g).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from halfstep.distributed.reducer import gather

Crossing: TypeAlias = Callable[[Tensor, DeviceMesh], Tensor]
"""What a border does to a tensor, in forward or in backward."""


def copy_to(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x`` itself; backward sums the gradients that the ranks compute for it.

    Args:
        x: Any shape, the same on all ranks.
        mesh: The tensor axis.
    """
    return _cross(x, mesh, _same, sum_over_ranks)


def reduce_from(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum all ranks' ``x`` in its dtype, with the same bits on all ranks."""
    return _cross(x, mesh, sum_over_ranks, _same)


def gather_replicated(x: Tensor, mesh: DeviceMesh, dim: int, size: int | None = None) -> Tensor:
    """Gather all parts of ``dim``, for work that every rank does alike.

    Args:
        x: This rank's part.
        mesh: The tensor axis.
        dim: The dim of which ranks hold parts, as ``torch.chunk`` makes them.
        size: Size of the whole dim; None if all parts are as long as this one.
    """
    dim %= x.ndim
    whole = x.shape[dim] * mesh.size() if size is None else size
    missing = -(-whole // mesh.size()) - x.shape[dim]

    def there(x: Tensor, mesh: DeviceMesh) -> Tensor:
        if missing:  # collectives need equal parts
            x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])
        return _gather(x, mesh, dim).narrow(dim, 0, whole)

    def back(grad: Tensor, mesh: DeviceMesh) -> Tensor:
        return grad.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()].contiguous()

    return _cross(x, mesh, there, back)


class _Border(torch.autograd.Function):
    """Applies one function of a tensor and the mesh in forward, and its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, there: Crossing, back: Crossing) -> Tensor:
        ctx.mesh, ctx.back = mesh, back
        return there(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.mesh), None, None, None


def _cross(x: Tensor, mesh: DeviceMesh, there: Crossing, back: Crossing) -> Tensor:
    return cast(Tensor, _Border.apply(x, mesh, there, back))  # type: ignore[no-untyped-call]


def _same(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x.view_as(x)


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum all ranks' ``x`` without gradient; 16-bit elements are added in fp32.

    Returns:
        A new tensor of the shape and dtype of ``x``.
    """
    if x.element_size() >= 4:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=mesh.get_group())
        return total
    # Reduce-scatter and all-gather send what a ring all-reduce does, but never round partial sums.
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, [0, -len(flat) % mesh.size()])
    return _gather(_sum_own_part(padded, mesh, 0), mesh, 0)[: len(flat)].view(x.shape)


def max_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the elementwise maximum over the ranks, without gradient; NaN may be lost."""
    largest = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return largest


def _gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Concatenate all ranks' ``x``, of equal shape, along ``dim`` in the order of the ranks."""
    parts_R = x.new_empty((mesh.size(), *x.shape))
    gather(parts_R.view(-1), x.reshape(-1), mesh.get_group()).wait()
    return parts_R.movedim(0, dim).flatten(dim, dim + 1)


def _sum_own_part(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Sum this rank's part of ``dim`` in rank order, in fp32 or wider, rounded once.

    The sum starts at the first rank's values, not at 0, because 0 + -0.0 would lose the sign.
    """
    mine_R = torch.stack(x.chunk(mesh.size(), dim))
    theirs_R = torch.empty_like(mine_R)
    dist.all_to_all_single(theirs_R, mine_R, group=mesh.get_group())
    first, *rest = theirs_R.unbind()
    total = first.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for part in rest:
        total += part
    return total.to(x.dtype)
