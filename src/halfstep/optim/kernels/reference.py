"""The reference kernel: one optimizer step of many tensors in torch operations, and its inputs.

Every kernel computes for each element, in fp32::

    w, m, v = master(weight, remainder), decode(first), decode(second)
    w, m, v = algorithm.move(w, gradient * multiplier, m, v)
    weight, remainder = store(w) ; first, second = encode(m), encode(v)

The torch operations below are the definition; compiled kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from halfstep.optim.moments import BLOCK, Moments, decode, encode
from halfstep.optim.rules import Algorithm
from halfstep.optim.state import Batch, StepTask, parts_of
from halfstep.precision.masters.rounding import (
    ROUNDING,
    Update,
    master,
    random_bits,
)
from halfstep.precision.masters.stepping import DeviceDecision

# Elements per chunk: fp32 temporaries of this size stay in the caches. A multiple of BLOCK.
_CHUNK = 256 * BLOCK


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a step that all tensors of one kernel call share."""

    algorithm: Algorithm  # the update rule
    constants: tuple[float, ...]  # its constants at this step
    update: Update  # the rounding mode of weights
    moments: Moments  # the format of moments
    multiplier: float  # a factor of every gradient: 1 / loss scale, times a clip factor
    seed: int  # seed of the random bits
    step: int  # number of the step, from 1
    # on CUDA: whether the step is applied, and a further factor; None: it is, and 1
    decision: DeviceDecision | None = None


def run_torch(batch: Batch, plan: Plan) -> None:
    """Take a step in torch operations, chunk by chunk, on any device."""
    for task in batch.tasks:
        for part in parts_of(task.weight, _CHUNK):
            _chunk(task, plan, part)


def _chunk(task: StepTask, plan: Plan, part: slice) -> None:
    blocks = slice(part.start // BLOCK, part.stop // BLOCK)
    weight = task.weight[part]
    remainder = None if task.remainder is None else task.remainder[part]
    held = [
        decode(codes[part], tops[blocks], signed=i == 0)
        for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True))
    ]
    gradient = task.flat_gradient[part].float() * plan.multiplier
    first, second = (held[0], held[-1]) if held else (gradient, gradient)
    value, *new = plan.algorithm.move(
        master(weight, remainder), gradient, first, second, plan.constants
    )

    def bits(stream: int) -> Tensor:
        begin, place, count = part.start, weight.device, len(weight)
        return random_bits(plan.seed, plan.step, count, stream=stream, start=begin, device=place)

    mode = ROUNDING[plan.update]
    noise = bits(2 * task.stream) if mode.random else None
    if mode.remainder_dtype is not None and remainder is None:
        mode = ROUNDING["nearest"]  # an fp32 weight needs none
    kept, rest = mode.split(value, noise)
    weight.copy_(kept)
    if remainder is not None and rest is not None:
        remainder.copy_(rest)
    noise = bits(2 * task.stream + 1) if plan.moments != "fp32" else None
    for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
        stored, top = encode(new[i], plan.moments, noise, signed=i == 0)
        codes[part].copy_(stored)
        if top is not None:
            tops[blocks].copy_(top)


# Elements at once: 256 KB of fp32, so that the dozen temporaries of a split stay in the caches.
_PART = 1 << 16


def read_masters(batch: Batch, values: Sequence[Tensor], update: Update) -> None:
    """Write the :func:`master` of each task, of any size, into the fp32 tensor for it."""
    for task, value in zip(batch.tasks, values, strict=True):
        for part in parts_of(task.weight, _PART):
            held = None if task.remainder is None else task.remainder[part]
            value[part].copy_(master(task.weight[part], held))
