"""Sums gradients over data-parallel ranks, for every precision policy, while backward runs.

torch's DistributedDataParallel reduces ``parameter.grad`` in the parameter's dtype, after every
micro-batch, and averages. Here micro-batches accumulate first, and the policy's ``reduce_dtype`` is
used to sum over ranks::

    backward of the last micro-batch    a parameter's gradient is finished: count it
      all of a bucket are, and earlier  copy them into its flat buffer, start its sum
      buckets have started
    finish()                            start the rest, wait, return the sums as views

Buckets start in the same order on every rank, in whatever order gradients are finished there. The
result is a SUM: divide the loss by the count of the whole batch of all ranks.

**Source:** Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 3.2: buckets in reverse order, and overlap.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.data.flat_sums import (
    Bucket,
    as_reduce_dtype,
    make_buckets,
    sparse_gradients,
)
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.traffic import Traffic, all_reduce
from halfstep.errors import PrecisionError
from halfstep.precision.border import require, require_model
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.step import Precision

MIB = 2**20
# As in torch's DDP: its bucket_cap_mb, and torch.distributed._DEFAULT_FIRST_BUCKET_BYTES.
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * MIB, MIB


class GradientReducer:
    """Gives every rank of a group the same gradients: the sums over all of them.

    ::

        for batch in micro_batches[:-1]:
            precision.backward(loss(batch))
        with reducer.last():
            precision.backward(loss(micro_batches[-1]))
        reducer.finish()
        precision.step()

    From then on, gradients are views of the reducer's buffers; to keep them beyond the next
    backward, copy them.
    """

    def __init__(
        self,
        precision: Precision,
        group: dist.ProcessGroup,
        reduce_dtype: str | torch.dtype,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        ranks_per_machine: int | None = None,
    ) -> None:
        """Allocate buffers and register hooks; all ranks of the group call it together.

        The buffers are permanent and hold the gradients: 4 bytes per trainable element; with 16
        bits on the wire 2 more, or only 2 in all where the gradients may stay in 16 bits.

        Args:
            precision: Each parameter that its optimizers update is reduced, once.
            group: The ranks with different data; its backend must support the model's device.
            reduce_dtype: Dtype on the wire, by name or value. fp32 adds by the group's all-reduce.
                bf16 and fp16 round every rank's gradient once, add in fp32 and round the sum once;
                with several ranks on each of several machines, each machine's sum is rounded too.
            bucket_bytes: Size of a bucket on the wire.
            ranks_per_machine: Number of the run's processes on each machine, numbered machine by
                machine; None: what torchrun says (LOCAL_WORLD_SIZE).

        Raises:
            PrecisionError: If ``reduce_dtype`` is none of these, an embedding has sparse gradients,
                nothing is trainable, or ranks differ in what they train.
        """
        require(precision, Precision, "GradientReducer(precision)", "a halfstep.Precision")
        reduce_dtype = as_reduce_dtype(reduce_dtype)
        if bucket_bytes < 1:
            raise PrecisionError(f"bucket_bytes={bucket_bytes}; allowed: integers >= 1")
        self.armed = False
        """Whether the backward that is running is the last of the step."""
        self._precision = precision
        self._reduce_dtype = reduce_dtype
        self._ranks = dist.get_world_size(group)
        self._trained = _trained(precision)
        self._stamp = _stamp(precision)
        self._buckets: list[Bucket] = []
        self._next = 0  # index of the first bucket that has not started
        self._running: list[Iterator[None]] = []  # remaining phases of sums, the oldest first
        self._checked = False  # whether this step has checked that the same parameters are trained
        self._stream = None
        if self._ranks == 1:
            return  # one rank's gradients are the sums, and are not rounded for sending
        self._check(group, reduce_dtype, bucket_bytes)
        groups = [group]
        if reduce_dtype != torch.float32:
            groups = split_by_machine(group, ranks_per_machine, precision.device)
        policy, device = precision.policy, precision.device
        # halfstep's optimizers accept 16-bit gradients; others need the weights' dtype.
        low = policy.update != "nearest" or policy.grad_dtype != torch.float32
        self._buckets = make_buckets(
            {name: parameter for name, (_, parameter) in reversed(self._trained.items())},
            groups,
            reduce_dtype,
            reduce_dtype if low else torch.float32,
            bucket_bytes,
            min(FIRST_BUCKET_BYTES, bucket_bytes),
        )
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            for name in bucket.names:
                hook = partial(self._finished, bucket, name)
                self._trained[name][0].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in one step, padding included."""
        return sum(bucket.sum.sent_bytes for bucket in self._buckets)

    @property
    def fp32_bytes_per_step(self) -> int:
        """Bytes that this rank would send with ``reduce_dtype`` fp32 and the same buffers."""
        sizes = [bucket.sum.buffer.numel() * torch.float32.itemsize for bucket in self._buckets]
        return sum(all_reduce(size, self._ranks) for size in sizes)

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """Return the context for the backward of a step's last micro-batch; one backward only.

        Raises:
            PrecisionError: If the set of trainable parameters has changed, or :meth:`finish` was
                not called after the step before.
        """
        if self._checked:
            raise PrecisionError("last() came twice; call finish() once after the last backward")
        self._require_unchanged()
        self._checked = self.armed = True
        try:
            yield
        finally:
            self.armed = False

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the sums of all gradients, the same bits on every rank; all ranks call it.

        A gradient that is missing on this rank counts as zeros; one that is missing on every rank
        stays None, as on one device.

        Raises:
            PrecisionError: If a gradient is sparse; or, without :meth:`last`, if the set of
                trainable parameters has changed.
        """
        self.armed = False
        if not self._checked:
            self._require_unchanged()
        self._checked = False
        if not self._buckets:
            return
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        with self._aside():
            while self._running:
                self._advance()
            for bucket in self._buckets:
                bucket.sum.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._precision.device).wait_stream(self._stream)
        for bucket in self._buckets:
            if self._wire_scale != 1.0:
                bucket.sum.result.mul_(1.0 / self._wire_scale)
            self._precision.masters.replace(bucket.sums())
            bucket.reset()
        self._next = 0

    def _finished(self, bucket: Bucket, name: str, weight: Tensor) -> None:
        """Count a gradient that backward has finished, and start complete buckets in order."""
        if not self.armed:
            return
        if bucket.started:
            raise PrecisionError(
                f"{name} got a gradient after its bucket was on its way to the other ranks: inside "
                "last() call backward once, on the sum of the losses, and use_reentrant=False in "
                "torch.utils.checkpoint"
            )
        bucket.pending.discard(name)
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._start(self._buckets[self._next])

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        """Fill the next bucket and launch its sum, after the next phases of earlier sums."""
        bucket.fill(self._precision.masters, self._wire_scale)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._precision.device))
        with self._aside():
            self._running.append(bucket.sum.phases())
            self._advance()
        self._next += 1

    @property
    def _wire_scale(self) -> float:
        """Factor of gradients on the wire: the loss scale for fp16, where small ones underflow."""
        scale = self._precision.loss_scale.value
        return scale if self._reduce_dtype == torch.float16 else 1.0

    def _advance(self) -> None:
        """Launch the next phase of every sum that has one, the oldest sum first."""
        self._running = [phases for phases in self._running if next(phases, True) is None]

    def _aside(self) -> AbstractContextManager[object]:
        """Return a context with a separate CUDA stream, so that waiting does not delay backward."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def _require_unchanged(self) -> None:
        if _stamp(self._precision) == self._stamp:
            return
        now = _trained(self._precision)
        odd = sorted({*self._trained} ^ {*now}) or ["the same names, but other tensors"]
        raise PrecisionError(
            "other parameters are trained than when the GradientReducer was made: "
            f"{', '.join(odd[:5])}; make Precision and GradientReducer after freezing, unfreezing "
            "or replacing parameters"
        )

    def _check(
        self, group: dist.ProcessGroup, reduce_dtype: torch.dtype, bucket_bytes: int
    ) -> None:
        """Refuse sparse embeddings, and ranks whose buckets differ, which would deadlock."""
        model = self._precision.model
        weights: dict[Tensor, str] = {weight: name for name, (weight, _) in self._trained.items()}
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                weight = module.weight
                if weight in weights:
                    raise sparse_gradients(weights[weight])
        if not weights:
            raise PrecisionError("the optimizer holds no trainable parameter: nothing to reduce")
        shapes = [(n, p.dtype, tuple(p.shape)) for n, (_, p) in self._trained.items()]
        text = repr((shapes, reduce_dtype, bucket_bytes))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        table = torch.tensor([number, -number], device=self._precision.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = table.tolist()
        if largest != -smallest:
            raise PrecisionError(
                "the ranks' trainable parameters, reduce_dtype or bucket_bytes differ; build the "
                "same model with the same options on each"
            )


class DataParallel(Strategy):
    """Sums gradients over the ``data`` axis, in ``reduce_dtype``, while backward runs."""

    _reducer: GradientReducer | None = None

    def attach_(self, precision: Precision) -> None:
        """Attach as on one device, and make a reducer if there are several shares of the batch."""
        super().attach_(precision)
        if self.layout.data > 1:
            assert self.mesh is not None
            group = self.mesh.get_group("data")
            self._reducer = GradientReducer(precision, group, self.policy.reduce_dtype)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context; in the last micro-batch, sums start as gradients are finished."""
        if last and self._reducer is not None:
            return self._reducer.last()
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Wait for the sums of gradients over the ranks."""
        if self._reducer is not None:
            self._reducer.finish()

    def traffic(self, micro_batches: int) -> tuple[Traffic, Traffic]:
        """Return the reducer's bytes; micro-batches accumulate before anything is sent."""
        if self._reducer is None:
            return Traffic(), Traffic()
        sent, fp32 = self._reducer.bytes_per_step, self._reducer.fp32_bytes_per_step
        return Traffic(gradients=sent), Traffic(gradients=fp32)


def _trained(precision: Precision) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Map names to the model's parameter and the tensor that the optimizer updates for it."""
    owned = {p for o in precision.optimizers for group in o.param_groups for p in group["params"]}
    targets = precision.named_parameters()
    named = precision.model.named_parameters()
    return {n: (p, targets.get(n, p)) for n, p in named if p.requires_grad and p in owned}


def _stamp(precision: Precision) -> list[int]:
    """Identify the trainable tensors of model and optimizers; cheap, as every step checks it."""
    owned = [p for o in precision.optimizers for group in o.param_groups for p in group["params"]]
    return [id(p) for p in (*precision.model.parameters(), *owned) if p.requires_grad]


def broadcast_(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the parameters and buffers of the group's first rank to all its ranks, bit for bit.

    Call it before making :class:`~halfstep.precision.step.Precision`, whose masters start from the
    weights at that time. Of sharded parameters, the local parts are copied.

    Args:
        model: The same model on every rank, except for its values; changed in place.
        group: The ranks with different data.

    Raises:
        PrecisionError: If ``model`` is not a module.
    """
    require_model(model, "broadcast_(model)")
    broadcast_tensors_((*model.parameters(), *model.buffers()), group)


@torch.no_grad()
def broadcast_tensors_(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Copy the tensors (DTensors' local parts) of the group's first rank to all; collective."""
    waiting = []
    for tensor in {id(t): t for t in tensors}.values():
        part = local_part(tensor)
        values = part.contiguous()
        # sent as bytes, because some backends do not support every dtype
        data = values.reshape(-1).view(torch.uint8)
        work = dist.broadcast(data, group_src=0, group=group, async_op=True)
        waiting.append((work, part, values))
    for work, part, values in waiting:
        work.wait()
        if values is not part:
            part.copy_(values)


# Grouping of ranks by machine, for sums in two levels.


def neighbours(ranks: Sequence[int], rank: int, per_machine: int) -> list[list[int]]:
    """List the ranks that a rank adds with at each level.

    Args:
        ranks: The group's ranks, by their numbers in the run.
        rank: One of them.
        per_machine: Number of the run's ranks on every machine, numbered machine by machine.

    Returns:
        Two lists: the group's ranks on this rank's machine, and one rank of each machine, the one
        at the same position there. Or a single list of all ranks where two levels would not help:
        one machine has them all, each machine has one, machines have different numbers of ranks, or
        the group is not in the order of ranks.
    """
    machines = [[*own] for _, own in groupby(ranks, lambda other: other // per_machine)]
    count = len(machines[0])
    uneven = any(len(own) != count for own in machines)
    if len(machines) == 1 or count == 1 or uneven or [*ranks] != sorted(ranks):
        return [[*ranks]]
    inside = next(own for own in machines if rank in own)
    place = inside.index(rank)
    return [inside, [own[place] for own in machines]]


def split_by_machine(
    group: dist.ProcessGroup, ranks_per_machine: int | None, device: torch.device
) -> list[dist.ProcessGroup]:
    """Make the groups for a sum within machines and between them, or return the group alone.

    All ranks of the group call it together. With NCCL and a ``device_id`` in
    ``init_process_group``, where communicators are split from one, all ranks of the run must.

    Args:
        group: The ranks that add.
        ranks_per_machine: See :func:`neighbours`; None: what torchrun says, or else 1. If ranks
            differ in it, there is one level.
        device: Device of the buffers; its backend's timeout is used for the new groups.

    Raises:
        PrecisionError: If ``ranks_per_machine`` is below 1.
    """
    if ranks_per_machine is None:
        ranks_per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks_per_machine < 1:
        raise PrecisionError(f"ranks_per_machine={ranks_per_machine}; allowed: integers >= 1")
    table = torch.tensor([ranks_per_machine, -ranks_per_machine], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    most, least = table.tolist()
    ranks = dist.get_process_group_ranks(group)
    levels = neighbours(ranks, dist.get_rank(), ranks_per_machine)
    if most != -least or len(levels) == 1:
        return [group]
    backend: Any = group._get_backend(device)
    return [
        dist.new_group(
            level,
            timeout=backend.options._timeout,
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
        for level in levels
    ]
