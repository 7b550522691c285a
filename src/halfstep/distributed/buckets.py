"""Gradients of many parameters in one flat buffer, so that they are summed together.

A buffer holds, one after the other, each parameter's gradient in the parameter's own layout of
memory, filled up to a multiple of 16 numbers; then for each parameter a 1 if this rank has a
gradient for it, or else 0. The sum of these tells who has one at all, without a message of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.flat_sums import DirectSum, FlatSum, Level, RoundedSum
from halfstep.errors import PrecisionError

ALIGNMENT = 16  # numbers: 64 bytes of fp32, a cache line and the widest vector register


class HoldsGradients(Protocol):
    """Where finished gradients are: :class:`halfstep.precision.master_weights.MasterWeights`."""

    def gradients(self, parameters: Sequence[nn.Parameter]) -> Mapping[nn.Parameter, Tensor]:
        """The finished gradients of those that have one."""

    def replace(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Put these in the places of the finished gradients; others stay."""


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, named: Mapping[str, nn.Parameter], total: FlatSum) -> None:
        """Lay the parameters out in the buffer.

        Args:
            named: What the optimizer updates, by name.
            total: Of :func:`elements` numbers or more.
        """
        self.sum = total
        self.names = [*named]
        self.started = False
        self.pending = set(self.names)
        """Parameters that the last micro-batch has not reached yet."""
        self._parameters = [*named.values()]
        self._absent: list[int] = []
        offset, inputs, results = 0, [], []
        for parameter in self._parameters:
            inputs.append(_view(total.buffer, parameter, offset))
            results.append(_view(total.result, parameter, offset))
            offset += _aligned(parameter.numel())
        self._inputs = inputs
        self._results = dict(zip(self._parameters, results, strict=True))
        end = offset + len(inputs)
        self._have, self._anyone_has = total.buffer[offset:end], total.result[offset:end]

    def fill(self, masters: HoldsGradients, scale: float = 1.0) -> None:
        """Copy this rank's gradients into the buffer; those that it has not are zeros.

        Their memory is freed: until :meth:`sums` the buffer stands for them.

        Args:
            masters: Have the gradients.
            scale: Multiplies them before they are rounded to the buffer's format.

        Raises:
            PrecisionError: If one is sparse.
        """
        self.started = True
        found = masters.gradients(self._parameters)
        sparse = [
            name
            for name, parameter in zip(self.names, self._parameters, strict=True)
            if parameter in found and found[parameter].is_sparse
        ]
        if sparse:
            raise sparse_gradients(sparse[0])
        self._absent = [i for i, p in enumerate(self._parameters) if p not in found]
        gradients = [*found.values()]
        if scale != 1.0 and gradients:
            gradients = list(torch._foreach_mul(gradients, scale))
        if not self._absent:
            torch._foreach_copy_(self._inputs, gradients)
            self._have.fill_(1)
            masters.replace(self._results)
            return
        torch._foreach_zero_([self._inputs[i] for i in self._absent])
        present = [
            view for view, p in zip(self._inputs, self._parameters, strict=True) if p in found
        ]
        if present:
            torch._foreach_copy_(present, gradients)
        self._have.copy_(torch.tensor([float(p in found) for p in self._parameters]))
        masters.replace({p: self._results[p] for p in found})

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """The summed gradients of those that have one on any rank; views of the buffer.

        The host waits for the device only where this rank had none.
        """
        if not self._absent:
            return self._results
        found = [have > 0 for have in self._anyone_has.tolist()]
        return {p: g for (p, g), yes in zip(self._results.items(), found, strict=True) if yes}

    def reset(self) -> None:
        """Be ready for the next step."""
        self.started = False
        self.pending = set(self.names)


def make_buckets(
    named: Mapping[str, nn.Parameter],
    groups: Sequence[dist.ProcessGroup],
    reduce_dtype: torch.dtype,
    result_dtype: torch.dtype,
    bucket_bytes: int,
    first_bytes: int,
) -> list[Bucket]:
    """Spread parameters over buckets in their order.

    Args:
        named: What the optimizer updates, by name; on one device.
        groups: Whose ranks add: one, or within a machine and between machines (16 bits only).
        reduce_dtype: On the wire.
        result_dtype: Of the sums: ``reduce_dtype`` or fp32.
        bucket_bytes: On the wire; a bucket holds more only where a single parameter does.
        first_bytes: The same for the first, which is ready first.
    """
    ranks = math.prod(dist.get_world_size(group) for group in groups)
    device = next(iter(named.values())).device
    filled: list[dict[str, nn.Parameter]] = [{}]
    size = 0
    for name, parameter in named.items():
        own = parameter.numel() * reduce_dtype.itemsize
        if filled[-1] and size + own > (first_bytes if len(filled) == 1 else bucket_bytes):
            filled.append({})
            size = 0
        filled[-1][name] = parameter
        size += own
    sizes = [elements([*part.values()], ranks) for part in filled]
    if reduce_dtype == torch.float32:
        return [
            Bucket(part, DirectSum(size, groups[0], device))
            for part, size in zip(filled, sizes, strict=True)
        ]
    levels, largest = [], max(sizes)
    for group in groups:
        levels.append(Level(largest, group, reduce_dtype, device))
        largest //= levels[-1].ranks
    return [
        Bucket(part, RoundedSum(size, levels, result_dtype))
        for part, size in zip(filled, sizes, strict=True)
    ]


def elements(parameters: Sequence[Tensor], ranks: int) -> int:
    """Numbers in a buffer for these parameters that ``ranks`` can share equally."""
    numbers = sum(_aligned(parameter.numel()) for parameter in parameters) + len(parameters)
    return -(-numbers // (ranks * ALIGNMENT)) * ranks * ALIGNMENT


def sparse_gradients(name: str) -> PrecisionError:
    """The error for a parameter whose gradient is sparse."""
    return PrecisionError(
        f"the gradient of {name} is sparse, and sums over ranks are of dense gradients; use "
        "sparse=False in the embedding"
    )


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """A view in the parameter's order of memory, or contiguous if that has holes."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, offset)
