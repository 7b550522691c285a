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

from halfstep.optim.rules import Algorithm
from halfstep.optim.storage.moments import BLOCK, Moments, decode, encode
from halfstep.optim.storage.state import StepTask
from halfstep.optim.storage.weights import master, store_
from halfstep.precision.masters.rounding import Update, random_bits, rounding_mode
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


def run_torch(tasks: Sequence[StepTask], plan: Plan) -> None:
    """Take a step in torch operations, chunk by chunk, on any device."""
    for task in tasks:
        for start in range(0, task.weight.numel(), _CHUNK):
            _chunk(task, plan, start, min(start + _CHUNK, task.weight.numel()))


def _chunk(task: StepTask, plan: Plan, start: int, end: int) -> None:
    part = slice(start, end)
    blocks = slice(start // BLOCK, -(-end // BLOCK))
    weight = task.weight[part]
    remainder = None if task.remainder is None else task.remainder[part]
    held = [
        decode(codes[part], tops[blocks], signed=i == 0)
        for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True))
    ]
    gradient = task.flat_gradient[part].float() * plan.multiplier
    first, second = (held[0], held[-1]) if held else (gradient, gradient)
    value, *new = plan.algorithm.move(
        master(weight, remainder, plan.update), gradient, first, second, plan.constants
    )

    def bits(stream: int) -> Tensor:
        return random_bits(
            plan.seed, plan.step, end - start, stream=stream, start=start, device=weight.device
        )

    noise = bits(2 * task.stream) if rounding_mode(plan.update).random else None
    store_(weight, remainder, plan.update, value, noise)
    noise = bits(2 * task.stream + 1) if plan.moments != "fp32" else None
    for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True)):
        stored, top = encode(new[i], plan.moments, noise, signed=i == 0)
        codes[part].copy_(stored)
        if top is not None:
            tops[blocks].copy_(top)
