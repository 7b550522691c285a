"""A communication hook for torch's DistributedDataParallel that sums gradients in a given dtype."""

# No "from __future__ import annotations", as DDP compares a hook's annotations with actual types.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.data.flat_sums import add_by_rank, as_reduce_dtype, gather

Hook = Callable[[dist.ProcessGroup | None, Any], torch.futures.Future[Tensor]]


def sum_hook(reduce_dtype: str | torch.dtype, scale: Callable[[], float] | None = None) -> Hook:
    """Make a DDP communication hook that sums gradients, not averages them, in ``reduce_dtype``.

    Use it as ``ddp_model.register_comm_hook(group, sum_hook(torch.bfloat16))``, where ``group`` is
    DDP's group, or None for the default one. Divide the loss by the count of the whole batch of all
    ranks, not by that of a rank's share.

    Args:
        reduce_dtype: Dtype on the wire: fp32, bf16 or fp16, by name or value. 16-bit elements are
            added in fp32 and rounded once, as in :mod:`halfstep.distributed.data.flat_sums`; the
            hook then waits for the exchange of parts, and only the gather overlaps with backward.
        scale: With fp16 on the wire, returns the factor for gradients there, so that small ones
            are not flushed to 0: ``lambda: precision.loss_scale.value`` with a
            :class:`halfstep.Precision`, whose gradients are unscaled. None: they are scaled
            already, as with a ``GradScaler``.

    Returns:
        The hook.

    Raises:
        PrecisionError: For any other dtype.
    """
    wire_dtype = as_reduce_dtype(reduce_dtype)

    def hook(
        state: dist.ProcessGroup | None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # missing in torch's stubs
    ) -> torch.futures.Future[Tensor]:
        group = dist.group.WORLD if state is None else state
        assert group is not None, "DDP has one"
        buffer = bucket.buffer()
        if wire_dtype == torch.float32:
            wide = buffer.float()
            work = dist.all_reduce(wide, group=group, async_op=True)
            return _then(work, buffer, wide, 1.0)
        ranks = dist.get_world_size(group)
        padded = -(-buffer.numel() // ranks) * ranks
        wire = torch.zeros(padded, dtype=wire_dtype, device=buffer.device)
        factor = 1.0 if scale is None else scale()
        wire[: buffer.numel()].copy_(buffer if factor == 1.0 else buffer * factor)
        received = torch.empty_like(wire)
        dist.all_to_all_single(received, wire, group=group)
        part = torch.empty_like(wire[: padded // ranks])
        total = torch.empty_like(part, dtype=torch.float32)
        add_by_rank(received.view(ranks, -1), total, part)
        return _then(gather(wire, part, group), buffer, wire[: buffer.numel()], 1.0 / factor)

    return hook


def _then(work: Any, buffer: Tensor, sums: Tensor, factor: float) -> torch.futures.Future[Tensor]:
    """Return a future that, once the work is done, holds the buffer with the sums * ``factor``."""

    def write(done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises what the collective raised
        if sums is not buffer:
            buffer.copy_(sums)
        return buffer if factor == 1.0 else buffer.mul_(factor)

    future: torch.futures.Future[Tensor] = work.get_future().then(write)
    return future
