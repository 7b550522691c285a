"""Sums of flat buffers over the ranks, in phases that overlap with other work.

In fp32 that is one all-reduce. In 16 bits a ring all-reduce would round after every one of its
n - 1 additions; here each rank sends every other one its part, adds what it received in fp32, and
sends the sum around::

    buffer    = round16(gradients)                       one rounding on each rank
    received  = all_to_all(parts of buffer)              (n - 1) / n of the bytes
    part      = round16(received[0] + received[1] + ...) in fp32, by rank; one rounding
    result    = all_gather(part)                         (n - 1) / n of the bytes

The bytes are those of a ring all-reduce in 16 bits, and the order of the additions is fixed, so the
bits of the result do not depend on how the numbers are spread over buffers.

Out of a machine, though, all its ranks' parts go in such an exchange, and in a ring one rank's. So
where a machine has several of the ranks, ``part`` is their sum alone, and before it is gathered it
is summed in the same way over the ranks with the same place on every machine: one rounding more.

An fp16 overflow becomes inf and stays it; NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.traffic import all_gather, all_reduce, reduce_scatter
from halfstep.errors import PrecisionError
from halfstep.precision.border import as_dtype
from halfstep.precision.policy import DTYPES, dtype_name


class FlatSum(Protocol):
    """One buffer's sum; every rank makes the same calls in the same order."""

    buffer: Tensor
    """This rank's numbers, 1-D, written before :meth:`start`."""
    result: Tensor
    """The sum, after :meth:`wait`; it may be the same memory."""
    sent_bytes: int
    """What one rank sends for one sum."""

    def phases(self) -> Iterator[None]:
        """Launch one phase after the other, in each step of the iterator one.

        Buffers share memory between their phases: before one's n-th, those that started earlier
        launch their later ones, the oldest first.
        """

    def wait(self) -> None:
        """After all phases, let the host (on CUDA: the current stream) wait for ``result``."""


class DirectSum:
    """An all-reduce in place."""

    def __init__(self, elements: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.result = self.buffer = torch.zeros(elements, device=device)
        self.sent_bytes = all_reduce(self.buffer.nbytes, dist.get_world_size(group))
        self._group = group
        self._work: Any = None

    def phases(self) -> Iterator[None]:
        """One phase: the all-reduce of the whole buffer."""
        self._work = dist.all_reduce(self.buffer, group=self._group, async_op=True)
        yield

    def wait(self) -> None:
        """Wait for the all-reduce that :meth:`phases` has started."""
        self._work.wait()
        self._work = None


class Level:
    """Ranks that add among themselves, and what buffers need meanwhile, one after the other."""

    def __init__(
        self, elements: int, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate.

        Args:
            elements: Of the largest buffer.
            group: The ranks.
            dtype: On the wire.
            device: Of the buffers.
        """
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.received = torch.zeros(elements, dtype=dtype, device=device)
        self.total = torch.zeros(elements // self.ranks, device=device)


class RoundedSum:
    """16 bits on the wire, additions in fp32."""

    def __init__(self, elements: int, levels: Sequence[Level], result_dtype: torch.dtype) -> None:
        """Allocate.

        Args:
            elements: A multiple of the number of ranks.
            levels: Who adds: all ranks; or those of a machine, then those between machines.
            result_dtype: Of ``result``: the wire's dtype or fp32.
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
        """Exchange parts, add them by rank, sum that over the next level, and gather it."""
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
        """Wait for all parts, and widen them."""
        self._work.wait()
        self._work = None
        if self.result is not self.buffer:
            self.result.copy_(self.buffer)


def add_by_rank(received: Tensor, total: Tensor, part: Tensor) -> None:
    """Write the sum of the rows, added in fp32 from the first to the last and rounded once.

    Args:
        received: (ranks, elements), 16 bit.
        total: (elements,) fp32, overwritten.
        part: (elements,), 16 bit: the result.
    """
    if len(received) == 2:  # torch adds 16 bits in fp32 and rounds once: a quarter of the time
        torch.add(received[0], received[1], out=part)
        return
    total.copy_(received[0])
    for other in received[1:]:
        total.add_(other)
    part.copy_(total)


def gather(result: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to gather the ranks' parts one after the other; torch 2.13 has a new name for it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(result, part, group=group, async_op=True)


def as_reduce_dtype(value: str | torch.dtype) -> torch.dtype:
    """The format that gradients are summed in, by name or by value.

    Raises:
        PrecisionError: If it is none of fp32, bf16 and fp16.
    """
    dtype = as_dtype(value)
    if dtype not in DTYPES.values():
        raise PrecisionError(f"reduce={dtype_name(dtype)}; allowed: {', '.join(DTYPES)}")
    return dtype
