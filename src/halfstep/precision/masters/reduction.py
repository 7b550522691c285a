"""Sums gradients over the ranks of torch's DistributedDataParallel (DDP), as the policy says.

DDP sums ``parameter.grad`` bucket by bucket while a backward runs, in the parameter's dtype: with
16-bit weights in 16 bits, and it takes no fp32 gradient of an earlier micro-batch. So Precision
gives DDP a communication hook that sums in ``reduce_dtype``. Gradients that are kept in fp32 are
taken out of ``p.grad`` before DDP looks at them, and their sums are put there in the end::

    a gradient is accumulated    take it; DDP counts the parameter as ready
    a bucket is full             the hook joins what was taken, in fp32, and starts the sum
    the last bucket is full      the hook waits for all sums
    the backward has ended       sums into p.grad, and back what DDP did not sum (``no_sync``)

A sum in fp32 is one all-reduce. In 16 bits a ring all-reduce would round after every one of its
n - 1 additions; here each rank sends every other rank that one's part, adds what it received in
fp32, and sends the sum to all::

    buffer    = round16(gradients)                       one rounding on each rank
    received  = all_to_all(parts of buffer)              (n - 1) / n of the bytes
    part      = round16(received[0] + received[1] + ...) in fp32, by rank; one rounding
    result    = all_gather(part)                         (n - 1) / n of the bytes

This sends as many bytes as a ring all-reduce in 16 bits. The order of additions is fixed, so the
bits of the result do not depend on how the elements are spread over buckets. An fp16 overflow
becomes inf and stays so; NaN stays NaN.

**Source:** Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, sections 3.2 and 4.1.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision.policy.policy import LOW, PrecisionPolicy


class Reduction:
    """The sums of one Precision's gradients, over the ranks of the DDPs around its parameters."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self._policy = policy
        self._looked = False  # whether DDPs made after Precision were looked for
        self._hooked: list[_Hook] = []
        self._handles: list[RemovableHandle] = []
        self.prepare: Callable[[Tensor], object] | None = None
        """What is called with the loss of the next backward, before it begins."""
        self.running = False  # whether a backward is
        self.scale = 1.0  # of fp16 on the wire
        self.taken: dict[Tensor, Tensor] = {}
        self.sums: list[tuple[Tensor, Tensor]] = []

    def find(self, parameters: Collection[Tensor], *, renew: bool) -> None:
        """Give hooks to the DDPs around these parameters, wherever the user keeps them.

        ``renew`` those made before the weights were cast. A cast makes a new autograd node for each
        parameter, and DDP would wait for the old ones for ever.
        """
        known = [hook.wrapper() for hook in self._hooked]
        for wrapper in wrappers_of(self._policy, parameters):
            if not any(wrapper is one for one in known):
                if renew:
                    _renew(wrapper)
                self.attach(wrapper)

    def attach(self, wrapper: DistributedDataParallel, *, mean: bool = True) -> None:
        """Register the hook of one DDP, whose gradients become means, or else sums."""
        require_no_hook(self._policy, wrapper)
        hook = _Hook(self, wrapper, mean)
        wrapper.register_comm_hook(hook, _reduce)
        wrapper._comm_hooks.pop()  # DDP is pickled with them
        self._hooked.append(hook)

    def begin(self, loss: Tensor | None, scale: float, parameters: Collection[Tensor]) -> None:
        """Prepare for a backward: take what earlier ones have left, and then what it makes."""
        if not self._looked:
            self._looked = True
            self.find(parameters, renew=False)
        if self.prepare is not None and loss is not None:
            self.prepare(loss)
        self._hooked = [hook for hook in self._hooked if hook.wrapper() is not None]
        self.running = self.prepare is not None or any(hook.mean for hook in self._hooked)
        self.scale = scale if self._policy.reduce_dtype == torch.float16 else 1.0
        self._handles = []
        if not self.running or self._policy.grad_dtype != torch.float32:
            return
        for parameter in parameters:
            if parameter.dtype not in LOW or not parameter.requires_grad:
                continue
            take: Any = parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            self._handles.append(take)
            if parameter.grad is not None:  # DDP reads also what this backward does not reach
                self._take(parameter)
                back = parameter.register_hook(partial(self._put_back, parameter))  # type: ignore[no-untyped-call]
                self._handles.append(back)

    def _take(self, parameter: Tensor) -> None:
        """Leave what DDP takes for the gradient: one of the weight's dtype, of any values."""
        gradient = parameter.grad
        assert gradient is not None
        self.taken[parameter] = gradient
        if gradient.dtype != parameter.dtype:
            # grad_dtype stays, in which the next gradient is made
            parameter.grad = gradient.detach()
            parameter.grad.data = torch.empty_like(parameter)

    def _put_back(self, parameter: Tensor, _: Tensor) -> None:
        """Have autograd add to what earlier backwards have left, as a user's hooks expect."""
        earlier = self.taken.pop(parameter, None)
        if earlier is not None:
            parameter.grad = earlier

    def end(self) -> None:
        """Put sums, and what DDP did not sum, into ``p.grad``, as a backward has ended."""
        self.running = False
        for handle in self._handles:
            handle.remove()
        for parameter, total in self.sums:
            if parameter.grad is not None:  # else no rank has a gradient for it
                parameter.grad = total
        for parameter, gradient in self.taken.items():
            parameter.grad = gradient
        self.sums, self.taken = [], {}

    def close(self) -> None:
        """Give each DDP a reducer of its own again, which sums without a hook."""
        for hook in self._hooked:
            wrapper = hook.wrapper()
            if wrapper is not None:
                _renew(wrapper)
        self._hooked = []


class _Hook:
    """The state of one DDP's communication hook."""

    def __init__(self, owner: Reduction, wrapper: DistributedDataParallel, mean: bool) -> None:
        self.wrapper, self.mean = weakref.ref(wrapper), mean
        self._owner, self._group = owner, wrapper.process_group
        self._factor = 1 / dist.get_world_size(self._group) if mean else 1.0
        self._waiting: list[Callable[[], None]] = []  # the buckets that were sent
        parameters, _ = wrapper._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._parameters, self._arrived = len(parameters), 0

    @torch.no_grad()
    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start a bucket's sum; with the last one, complete all."""
        owner, buffer, parameters = self._owner, bucket.buffer(), bucket.parameters()
        flat, views, keeps = buffer, list[Tensor](), False
        if buffer.dtype in LOW:
            flat = torch.zeros_like(buffer, dtype=torch.float32)
            keeps = owner.running and owner._policy.grad_dtype == torch.float32
            if keeps:
                views = _views(flat, parameters)
                taken = [p in owner.taken for p in parameters]
                into = [*compress(views, taken)]
                if into:
                    gradients = [owner.taken.pop(p) for p in compress(parameters, taken)]
                    torch._foreach_copy_(into, gradients)
            else:
                flat.copy_(buffer)
        if self._factor != 1.0:
            flat.mul_(self._factor)
        total = start_sum(flat, self._group, owner._policy.reduce_dtype, owner.scale)
        devices = [buffer.device] if buffer.is_cuda else None
        future = torch.futures.Future[Tensor](devices=devices)

        def finish() -> None:
            total()
            if keeps:
                owner.sums += zip(parameters, views, strict=True)
            elif flat is not buffer:
                buffer.copy_(flat)
            future.set_result(buffer)

        self._waiting.append(finish)
        self._arrived += len(parameters)
        # in the first step of a static graph DDP calls none the last
        if bucket.is_last() or self._arrived == self._parameters:
            self._arrived = 0
            # not by callbacks of the sums: gloo has few threads, and they would wait for each other
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one()
        return future


def _reduce(state: _Hook, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


if dist.is_available():  # DDP compares these types, and does not read them from text
    bucket: Any = dist.GradBucket  # type: ignore[attr-defined]
    _reduce.__annotations__ |= {"bucket": bucket, "return": torch.futures.Future[Tensor]}


def wrappers_of(
    policy: PrecisionPolicy, parameters: Iterable[Tensor]
) -> list[DistributedDataParallel]:
    """The DDPs around these parameters that need a hook; also those that ``replicate`` hides."""
    if policy.param_dtype not in LOW and policy.reduce_dtype == torch.float32:
        return []
    if not dist.is_available() or not dist.is_initialized():
        return []
    own = {*map(id, parameters)}
    ddps = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return [o for o in ddps if any(id(p) in own for p in o.__dict__.get("_module_parameters", ()))]


def require_no_hook(policy: PrecisionPolicy, wrapper: DistributedDataParallel) -> None:
    """Refuse a DDP with a communication hook of the user's."""
    if wrapper._comm_hooks:
        raise PrecisionError(
            f"DistributedDataParallel has a communication hook, and policy {policy} needs one of "
            "its own: DDP takes only one. Leave yours out (for 16 bits on the wire use the field "
            "reduce=bf16), or use bf16-mixed"
        )


def _renew(wrapper: Any) -> None:
    """Make DDP's reducer anew, without a hook, as DDP does after it was unpickled."""
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()


def _views(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Views of a bucket, each in the memory order of its parameter if that has no gaps."""
    views, offset = list[Tensor](), 0
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views


# Sums of flat tensors.


def start_sum(
    flat: Tensor, group: dist.ProcessGroup, dtype: torch.dtype, scale: float = 1.0
) -> Callable[[], None]:
    """Start to sum an fp32 tensor over ranks in place; the returned function completes it.

    What is sent is multiplied by ``scale``: the loss scale for fp16, where small ones underflow.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:  # one rank's are the sums, and are not rounded for sending
        return lambda: None
    if dtype == torch.float32:
        work: Any = dist.all_reduce(flat, group=group, async_op=True)
        return lambda: work.wait()
    values = (flat.mul(scale) if scale != 1.0 else flat).to(dtype)
    buffer = torch.nn.functional.pad(values, [0, -len(values) % ranks])
    received = torch.empty_like(buffer).view(ranks, -1)
    sent: Any = dist.all_to_all_single(received.view(-1), buffer, group=group, async_op=True)

    def complete() -> None:
        sent.wait()
        part = add_by_rank(received)
        # torch 2.13 renames the function
        new = hasattr(dist, "all_gather_single")
        name = "all_gather_single" if new else "all_gather_into_tensor"
        getattr(dist, name)(buffer, part, group=group)
        flat.copy_(buffer[: len(flat)])
        if scale != 1.0:
            flat.mul_(1.0 / scale)

    return complete


def add_by_rank(received: Tensor) -> Tensor:
    """The sum of the rows, 16-bit: added in fp32 from the first to the last and rounded once."""
    if len(received) == 2:  # torch also adds two 16-bit tensors in fp32, in a quarter of the time
        return received[0] + received[1]
    total = received[0].float()
    for other in received[1:]:
        total.add_(other)
    return total.to(received.dtype)
