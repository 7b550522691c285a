"""Sums flat buffers over the ranks, in phases that overlap with other work.

In fp32 this is one all-reduce. In 16 bits a ring all-reduce would round after every one of its
n - 1 additions; here each rank sends every other rank that one's part, adds what it received in
fp32, and sends the sum to all::

    buffer    = round16(gradients)                       one rounding on each rank
    received  = all_to_all(parts of buffer)              (n - 1) / n of the bytes
    part      = round16(received[0] + received[1] + ...) in fp32, by rank; one rounding
    result    = all_gather(part)                         (n - 1) / n of the bytes

This sends as many bytes as a ring all-reduce in 16 bits. The order of additions is fixed, so the
bits of the result do not depend on how the elements are spread over buffers.

Such an exchange, though, sends the parts of all a machine's ranks out of that machine, where a ring
sends one rank's. So where machines have several of the ranks, ``part`` is first the sum within the
machine, and before it is gathered it is summed in the same way over the ranks at the same position
of every machine, with one more rounding. An fp16 overflow becomes inf and stays so; NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.traffic import all_gather, all_reduce, reduce_scatter
from halfstep.errors import PrecisionError
from halfstep.precision.border import as_dtype
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.policy.policy import DTYPES, dtype_name


class DirectSum:
    """A sum by an all-reduce in place.

    Every kind of sum has a 1-D ``buffer`` for this rank's elements, a ``result``, in the same
    memory or not, which holds the sum after all :meth:`phases` and :meth:`wait`, and
    ``sent_bytes``, which a rank sends for it. Each step of the iterator launches one phase. Sums
    share scratch memory, so whenever one advances, those that started earlier advance before it.
    """

    def __init__(self, elements: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.result = self.buffer = torch.zeros(elements, device=device)
        self.sent_bytes = all_reduce(self.buffer.nbytes, dist.get_world_size(group))
        self._group = group
        self._work: Any = None

    def phases(self) -> Iterator[None]:
        """Launch the only phase, the all-reduce of the whole buffer."""
        self._work = dist.all_reduce(self.buffer, group=self._group, async_op=True)
        yield

    def wait(self) -> None:
        """Wait for the all-reduce that :meth:`phases` has started."""
        self._work.wait()
        self._work = None


class Level:
    """A group of ranks that add among themselves, with scratch memory that buffers take in turn."""

    def __init__(
        self, elements: int, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate for the largest buffer, of ``elements`` elements, with ``dtype`` on the wire."""
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.received = torch.zeros(elements, dtype=dtype, device=device)
        self.total = torch.zeros(elements // self.ranks, device=device)


class RoundedSum:
    """A sum with 16 bits on the wire and additions in fp32."""

    def __init__(self, elements: int, levels: Sequence[Level], result_dtype: torch.dtype) -> None:
        """Allocate the buffer, the result and this rank's part.

        Args:
            elements: Size of the buffer, a multiple of the number of ranks.
            levels: The groups that add: all ranks; or ranks within machines, then between them.
            result_dtype: Dtype of ``result``: the wire's or fp32.
        """
        self._level, *further = levels
        ranks = self._level.ranks
        self.buffer = torch.zeros_like(self._level.received[:elements])
        same = result_dtype == self.buffer.dtype
        self.result = self.buffer if same else torch.zeros_like(self.buffer, dtype=result_dtype)
        size = self.buffer.nbytes
        self.sent_bytes = reduce_scatter(size, ranks) + all_gather(size, ranks)
        self._further: RoundedSum | None = None
        if further:
            self._further = RoundedSum(elements // ranks, further, self.buffer.dtype)
            self.sent_bytes += self._further.sent_bytes
            self._part = self._further.buffer
        else:
            self._part = torch.zeros_like(self.buffer[: elements // ranks])
        self._work: Any = None

    def phases(self) -> Iterator[None]:
        """Exchange parts, add them in rank order, sum that over the next level, and gather it."""
        level, elements = self._level, self.buffer.numel()
        received = level.received[:elements]
        self._work = dist.all_to_all_single(received, self.buffer, group=level.group, async_op=True)
        yield
        self._work.wait()
        add_by_rank(received.view(level.ranks, -1), level.total[: self._part.numel()], self._part)
        if self._further is not None:
            yield from self._further.phases()
            self._further.wait()
        self._work = gather(self.buffer, self._part, level.group)
        yield

    def wait(self) -> None:
        """Wait for all parts, and widen them to the result's dtype."""
        self._work.wait()
        self._work = None
        if self.result is not self.buffer:
            self.result.copy_(self.buffer)


def add_by_rank(received: Tensor, total: Tensor, part: Tensor) -> None:
    """Write the sum of the rows, added in fp32 from the first to the last and rounded once.

    Args:
        received: (ranks, elements), 16-bit.
        total: (elements,) fp32, scratch memory.
        part: (elements,), 16-bit: the result.
    """
    if len(received) == 2:  # torch also adds two 16-bit tensors in fp32, in a quarter of the time
        torch.add(received[0], received[1], out=part)
        return
    total.copy_(received[0])
    for other in received[1:]:
        total.add_(other)
    part.copy_(total)


def gather(result: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-gather of the ranks' parts in rank order; torch 2.13 renames the function."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(result, part, group=group, async_op=True)


def as_reduce_dtype(value: str | torch.dtype) -> torch.dtype:
    """Return the dtype that gradients are summed in, given by name or value.

    Raises:
        PrecisionError: If it is not fp32, bf16 or fp16.
    """
    dtype = as_dtype(value)
    if dtype not in DTYPES.values():
        raise PrecisionError(f"reduce={dtype_name(dtype)}; allowed: {', '.join(DTYPES)}")
    return dtype


# Buckets: the gradients of many parameters in one flat buffer, so that they are summed together.
#
# A buffer holds, one after the other, each parameter's gradient in the parameter's own memory
# order, padded to a multiple of 16 elements; then for each parameter a 1 if this rank has a
# gradient for it, or else 0. The sum of these flags tells whether any rank has a gradient, without
# another message.


ALIGNMENT = 16  # elements: 64 bytes of fp32, a cache line and the widest vector register


class Bucket:
    """A set of parameters whose gradients are summed together."""

    def __init__(self, named: Mapping[str, nn.Parameter], total: DirectSum | RoundedSum) -> None:
        """Lay the parameters out in the buffer.

        Args:
            named: The tensors that the optimizer updates, by name.
            total: A sum of :func:`elements` elements or more.
        """
        self.sum = total
        self.names = [*named]
        self.started = False
        self.pending = set(self.names)
        """Parameters whose gradient the last micro-batch has not finished yet."""
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

    def fill(self, masters: MasterWeights, scale: float = 1.0) -> None:
        """Copy this rank's gradients into the buffer, with zeros for those that it does not have.

        The gradients' own memory is freed: views of the buffer take their place.

        Args:
            masters: Hold the gradients.
            scale: Multiplies the gradients before they are rounded to the buffer's dtype.

        Raises:
            PrecisionError: If a gradient is sparse.
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
        self._have.fill_(1)
        if self._absent:
            torch._foreach_zero_([self._inputs[i] for i in self._absent])
            self._have.copy_(torch.tensor([float(p in found) for p in self._parameters]))
        if gradients:
            pairs = zip(self._inputs, self._parameters, strict=True)
            torch._foreach_copy_([view for view, p in pairs if p in found], gradients)
        masters.replace({p: self._results[p] for p in found})

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Return the summed gradients of parameters that have one on any rank, as buffer views.

        The host waits for the device only if this rank lacked some gradient.
        """
        if not self._absent:
            return self._results
        found = [have > 0 for have in self._anyone_has.tolist()]
        return {p: g for (p, g), yes in zip(self._results.items(), found, strict=True) if yes}

    def reset(self) -> None:
        """Mark all gradients as pending again, for the next step."""
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
    """Distribute parameters over buckets in their order.

    Args:
        named: The tensors that the optimizer updates, by name; on one device.
        groups: Groups that add: one, or within a machine and between machines (16 bits only).
        reduce_dtype: Dtype on the wire.
        result_dtype: Dtype of the sums: ``reduce_dtype`` or fp32.
        bucket_bytes: Largest size on the wire; only a single larger parameter exceeds it.
        first_bytes: The same for the first bucket, which is smaller so that sums start early.
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
    """Return the size of a buffer for these parameters that ``ranks`` can share equally."""
    numbers = sum(_aligned(parameter.numel()) for parameter in parameters) + len(parameters)
    return -(-numbers // (ranks * ALIGNMENT)) * ranks * ALIGNMENT


def sparse_gradients(name: str) -> PrecisionError:
    """Make the error for a parameter whose gradient is sparse."""
    return PrecisionError(
        f"the gradient of {name} is sparse, and sums over ranks are of dense gradients; use "
        "sparse=False in the embedding"
    )


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """Make a view with the parameter's memory order, or a contiguous one if that has gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, offset)
