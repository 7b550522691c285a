"""One optimizer step of many tensors: what a kernel is given, and the kernel in torch operations.

Any kernel does, for each element, in fp32::

    w, m, v = master(weight, remainder), decode(first), decode(second)
    w, m, v = algorithm.move(w, gradient * multiplier, m, v)
    weight, remainder = store(w) ; first, second = encode(m), encode(v)

The torch operations below are the definition; compiled kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.optim.rules import Algorithm
from halfstep.optim.storage.moments import BLOCK, Moments, decode, encode
from halfstep.optim.storage.weights import RANDOM, master, store_
from halfstep.precision.masters.rounding import random_bits
from halfstep.precision.policy.policy import Update

# Elements at a time: fp32 temporaries of this size stay in the caches. A multiple of BLOCK.
_CHUNK = 256 * BLOCK


@dataclass(frozen=True, slots=True)
class Task:
    """One tensor's part of a step; every tensor is flat, contiguous and on one device.

    Attributes:
        weight: fp32 or bf16, shape (n,); updated in place, as are the next three.
        remainder: What the weight cannot hold, shape (n,), or None.
        moments: Codes, shape (n,) each, in the order of ``Algorithm.moments``.
        tops: The 8-bit moments' block tops, uint8 of shape (ceil(n / 128),); 0 elements otherwise.
        gradient: fp32, bf16 or fp16, shape (n,); read only.
        stream: Which random bits are this tensor's.
    """

    weight: Tensor
    remainder: Tensor | None
    moments: tuple[Tensor, ...]
    tops: tuple[Tensor, ...]
    gradient: Tensor
    stream: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What all tensors of one call share.

    Attributes:
        algorithm: The update rule.
        constants: Its constants at this step.
        update: How weights are kept.
        moments: How moments are kept.
        multiplier: Every gradient is multiplied by this: 1 / loss scale, times a clip factor.
        seed: Of the random bits.
        step: The step's number, from 1.
    """

    algorithm: Algorithm
    constants: tuple[float, ...]
    update: Update
    moments: Moments
    multiplier: float
    seed: int
    step: int


def mark_written(tasks: Iterable[Task]) -> None:
    """Tell autograd that a kernel has written these tasks' tensors behind torch's back.

    Without it a step between a forward and its backward would give a silently wrong gradient where
    torch's own optimizers raise "modified by an inplace operation".
    """
    for task in tasks:
        held = () if task.remainder is None else (task.remainder,)
        increment_version((task.weight, *held, *task.moments, *task.tops))


def run_torch(tasks: Sequence[Task], plan: Plan) -> None:
    """Take the step in torch operations, chunk by chunk; on any device."""
    for task in tasks:
        for start in range(0, task.weight.numel(), _CHUNK):
            _chunk(task, plan, start, min(start + _CHUNK, task.weight.numel()))


def _chunk(task: Task, plan: Plan, start: int, end: int) -> None:
    part = slice(start, end)
    blocks = slice(start // BLOCK, -(-end // BLOCK))
    weight = task.weight[part]
    remainder = None if task.remainder is None else task.remainder[part]
    held = [
        decode(codes[part], tops[blocks], signed=i == 0)
        for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True))
    ]
    gradient = task.gradient[part].float() * plan.multiplier
    value, *new = plan.algorithm.move(
        master(weight, remainder, plan.update), gradient, held[0], held[-1], plan.constants
    )

    def bits(stream: int) -> Tensor:
        return random_bits(
            plan.seed, plan.step, end - start, stream=stream, start=start, device=weight.device
        )

    noise = bits(2 * task.stream) if plan.update in RANDOM else None
    store_(weight, remainder, plan.update, value, noise)
    noise = bits(2 * task.stream + 1) if plan.moments != "fp32" else None
    for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
        stored, top = encode(new[i], plan.moments, noise, signed=i == 0)
        codes[part].copy_(stored)
        if top is not None:
            tops[blocks].copy_(top)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie one after the other in memory, in whatever dimension order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def dense(parameter: Tensor) -> Tensor:
    """The parameter's data, or a copy without holes where it is part of a larger tensor."""
    data = parameter.detach()
    return data if data.is_contiguous() or is_dense(data) else data.clone()


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor as one dimension, in the memory order of ``like``; a view where strides agree.

    Args:
        tensor: Same shape as ``like``.
        like: A tensor without holes or overlaps (:func:`is_dense`), in any dimension order.
    """
    if tensor.stride() != like.stride():
        moved = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = moved.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
