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

A sum in fp32 is one all-reduce. In 16 bits a ring all-reduce would round after every one of its
n - 1 additions; here each rank sends every other rank that one's part, adds what it received in
fp32, and sends the sum to all::

    buffer    = round16(gradients)                       one rounding on each rank
    received  = all_to_all(parts of buffer)              (n - 1) / n of the bytes
    part      = round16(received[0] + received[1] + ...) in fp32, by rank; one rounding
    result    = all_gather(part)                         (n - 1) / n of the bytes

This sends as many bytes as a ring all-reduce in 16 bits. The order of additions is fixed, so the
bits of the result do not depend on how the elements are spread over buffers. An fp16 overflow
becomes inf and stays so; NaN stays NaN.

**Source:** Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 3.2: buckets in reverse order, and overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed.strategy import Strategy
from halfstep.errors import PrecisionError
from halfstep.precision.border import require, require_model
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.policy.policy import DTYPES, dtype_name
from halfstep.precision.step import Precision

MIB = 2**20
# As in torch's DDP: its bucket_cap_mb, and torch.distributed._DEFAULT_FIRST_BUCKET_BYTES.
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * MIB, MIB
ALIGNMENT = 16  # elements: 64 bytes of fp32, a cache line and the widest vector register


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
    ) -> None:
        """Allocate buffers, which hold the gradients, and register hooks; all ranks call it.

        Args:
            precision: Each parameter that its optimizers update is reduced, once.
            group: The ranks with different data; its backend must support the model's device.
            reduce_dtype: Dtype on the wire, by name or value. fp32 adds by the group's all-reduce.
                bf16 and fp16 round every rank's gradient once, add in fp32 and round the sum once.
            bucket_bytes: Size of a bucket on the wire.

        Raises:
            PrecisionError: If ``reduce_dtype`` is none of these, or nothing is trainable.
        """
        require(precision, Precision, "GradientReducer(precision)", "a halfstep.Precision")
        reduce_dtype = as_reduce_dtype(reduce_dtype)
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
        if not self._trained:
            raise PrecisionError("the optimizer holds no trainable parameter: nothing to reduce")
        policy, device = precision.policy, precision.device
        # halfstep's optimizers accept 16-bit gradients; others need the weights' dtype.
        low = policy.update != "nearest" or policy.grad_dtype != torch.float32
        named = {name: parameter for name, (_, parameter) in reversed(self._trained.items())}
        result_dtype = reduce_dtype if low else torch.float32
        self._buckets = make_buckets(named, group, reduce_dtype, result_dtype, bucket_bytes)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            for name in bucket.names:
                hook = partial(self._finished, bucket, name)
                self._trained[name][0].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

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


# Sums of flat buffers.


class DirectSum:
    """A sum by an all-reduce in place.

    Every kind of sum has a 1-D ``buffer`` for this rank's elements and a ``result``, in the same
    memory or not, which holds the sum after all :meth:`phases` and :meth:`wait`. Each step of the
    iterator launches one phase. Sums share scratch memory, so whenever one advances, those that
    started earlier advance before it.
    """

    def __init__(self, elements: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.result = self.buffer = torch.zeros(elements, device=device)
        self._group = group
        self._work: Any = None

    def phases(self) -> Iterator[None]:
        """Launch the only phase, the all-reduce of the whole buffer."""
        self._work = dist.all_reduce(self.buffer, group=self._group, async_op=True)
        yield

    def wait(self) -> None:
        """Wait for the all-reduce that :meth:`phases` has started."""
        self._work.wait()


class RoundedSum:
    """A sum with 16 bits on the wire and additions in fp32."""

    def __init__(
        self, elements: int, group: dist.ProcessGroup, received: Tensor, result_dtype: torch.dtype
    ) -> None:
        """Allocate the buffer, the result and this rank's part.

        Args:
            elements: Size of the buffer, a multiple of the number of ranks.
            group: The ranks that add.
            received: Scratch memory that sums take in turn, in the dtype on the wire.
            result_dtype: Dtype of ``result``: the wire's or fp32.
        """
        self._group, self._received = group, received[:elements]
        self.buffer = torch.zeros_like(self._received)
        same = result_dtype == self.buffer.dtype
        self.result = self.buffer if same else torch.zeros_like(self.buffer, dtype=result_dtype)
        self._part = torch.zeros_like(self.buffer[: elements // dist.get_world_size(group)])
        self._work: Any = None

    def phases(self) -> Iterator[None]:
        """Exchange parts, add them in rank order, and gather the sums."""
        group = self._group
        self._work = dist.all_to_all_single(self._received, self.buffer, group=group, async_op=True)
        yield
        self._work.wait()
        add_by_rank(self._received.view(-1, len(self._part)), self._part)
        self._work = gather(self.buffer, self._part, group)
        yield

    def wait(self) -> None:
        """Wait for all parts, and widen them to the result's dtype."""
        self._work.wait()
        if self.result is not self.buffer:
            self.result.copy_(self.buffer)


def add_by_rank(received: Tensor, part: Tensor) -> None:
    """Write the sum of the rows, added in fp32 from the first to the last and rounded once.

    Args:
        received: (ranks, elements), 16-bit.
        part: (elements,), 16-bit: the result.
    """
    if len(received) == 2:  # torch also adds two 16-bit tensors in fp32, in a quarter of the time
        torch.add(received[0], received[1], out=part)
        return
    total = received[0].float()
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
    dtype: Any = DTYPES.get(value, value) if isinstance(value, str) else value
    if dtype not in DTYPES.values():
        raise PrecisionError(f"reduce={dtype_name(dtype)}; allowed: {', '.join(DTYPES)}")
    return dtype  # type: ignore[no-any-return]


# Buckets: the gradients of many parameters in one flat buffer, so that they are summed together.
#
# A buffer holds, one after the other, each parameter's gradient in the parameter's own memory
# order, padded to a multiple of 16 elements; then for each parameter a 1 if this rank has a
# gradient for it, or else 0. The sum of these flags tells whether any rank has a gradient, without
# another message.


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
            raise PrecisionError(
                f"the gradient of {sparse[0]} is sparse, and sums over ranks are of dense "
                "gradients; use sparse=False in the embedding"
            )
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
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype,
    result_dtype: torch.dtype,
    bucket_bytes: int,
) -> list[Bucket]:
    """Distribute parameters over buckets in their order.

    Args:
        named: The tensors that the optimizer updates, by name; on one device.
        group: The ranks that add.
        reduce_dtype: Dtype on the wire.
        result_dtype: Dtype of the sums: ``reduce_dtype`` or fp32.
        bucket_bytes: Largest size on the wire; only a single larger parameter exceeds it. The first
            bucket is smaller, so that sums start early.
    """
    ranks = dist.get_world_size(group)
    device = next(iter(named.values())).device
    filled: list[dict[str, nn.Parameter]] = [{}]
    size, most = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for name, parameter in named.items():
        own = parameter.numel() * reduce_dtype.itemsize
        if filled[-1] and size + own > most:
            filled.append({})
            size, most = 0, bucket_bytes
        filled[-1][name] = parameter
        size += own
    sizes = [elements([*part.values()], ranks) for part in filled]
    total: Iterator[DirectSum | RoundedSum]
    if reduce_dtype == torch.float32:
        total = (DirectSum(size, group, device) for size in sizes)
    else:
        received = torch.zeros(max(sizes), dtype=reduce_dtype, device=device)
        total = (RoundedSum(size, group, received, result_dtype) for size in sizes)
    return [Bucket(part, own) for part, own in zip(filled, total, strict=True)]


def elements(parameters: Sequence[Tensor], ranks: int) -> int:
    """Return the size of a buffer for these parameters that ``ranks`` can share equally."""
    numbers = sum(_aligned(parameter.numel()) for parameter in parameters) + len(parameters)
    return -(-numbers // (ranks * ALIGNMENT)) * ranks * ALIGNMENT


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """Make a view with the parameter's memory order, or a contiguous one if that has gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, offset)
