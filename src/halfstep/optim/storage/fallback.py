"""When 8 bits are too few for a second moment, and how a tensor's moments go over to bf16.

A block of 128 elements shares a window of 32 binades below its largest second moment, that is, of
gradients down to 2^-16 of the block's largest. Below it a second moment is stored as the window's
lowest number, which is too large: the element's updates, divided by its root, are too small, by any
factor (measured: 240 at a spread of 10^6). First moments have no such floor; they are right on
average. So a tensor is looked at in its steps 8, 16, 32, 64, 96, ...: an element counts whose
gradient is not 0 and whose second moment stands at the floor. From one such element in 16,384 on,
and from a single one in smaller tensors, both moments of the tensor become bf16 and stay so. See
docs/decisions/0012-moments-that-fall-back.md for why tensors, and for the threshold.

Everything here reads stored codes, which have the same bits in every kernel, and is computed by
torch's own elementwise operations, so that the decision and its result are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.optim.storage.moments import BLOCK, BROKEN, decode
from halfstep.optim.storage.state import StepTask

FIRST, EVERY = 8, 32
"""A tensor is first looked at after FIRST steps, then at twice as many, then every EVERY steps.

Sooner, an element whose first gradients are small by chance would count.
"""
SHARE = 2.0**-14
"""The share of a tensor's elements below their windows from which on it falls back."""
_CHUNK = 512 * BLOCK  # elements at a time: temporaries of less than 1 MB
_FLOOR = 1  # the lowest code that is not 0


def is_due(step: int) -> bool:
    """Whether a tensor is looked at after this step of its own, counted from 1."""
    doubled = FIRST <= step < EVERY and step & (step - 1) == 0
    return doubled or (step > 0 and step % EVERY == 0)


def elements_below(tasks: Sequence[StepTask]) -> list[int]:
    """For each task how many elements with a gradient stand at the floor of their window.

    The tasks are of one device, after their step; it is waited for once.
    """
    counts = []
    for task in tasks:
        count = torch.zeros((), dtype=torch.int64, device=task.weight.device)
        for start in range(0, task.weight.numel(), _CHUNK):
            below = _below(task, slice(start, start + _CHUNK))
            if below is not None:
                count += below.sum()
        counts.append(count)
    return [int(count) for count in torch.stack(counts).tolist()]


def must_fall_back(below: int, elements: int) -> bool:
    """Whether a tensor with so many elements below their windows goes over to bf16."""
    return below > 0 and below >= elements * SHARE


def wide_moments(task: StepTask, multiplier: float, correction: float) -> tuple[Tensor, Tensor]:
    """Both moments of a task in bf16, which holds every 8-bit number exactly.

    Where a second moment stood at the floor it starts again from the present gradient: its true
    value is lost, and the floor would need thousands of steps to fade.

    Args:
        task: With moments in 8 bits, after its step.
        multiplier: The gradient is multiplied by this.
        correction: ``1 - beta2**step``: what a second moment that has always seen the present
            gradient would be, divided by its square.

    Returns:
        bf16, of shape (n,) each.
    """
    first, second = (torch.empty_like(codes, dtype=torch.bfloat16) for codes in task.moments)
    smallest = torch.finfo(torch.bfloat16).tiny  # not 0: the update divides by the root
    for start in range(0, task.weight.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        blocks = slice(start // BLOCK, (start + _CHUNK) // BLOCK)
        m, v = (
            decode(codes[part], tops[blocks], signed=i == 0)
            for i, (codes, tops) in enumerate(zip(task.moments, task.tops, strict=True))
        )
        g = task.gradient[part].float() * multiplier
        anew = ((g * correction) * g).clamp_(min=smallest)
        first[part].copy_(m)
        below = _below(task, part)
        second[part].copy_(v if below is None else torch.where(below, torch.minimum(v, anew), v))
    return first, second


def _below(task: StepTask, part: slice) -> Tensor | None:
    """Which elements of a part are below their windows; None says that there is none."""
    codes = task.moments[1][part]
    # As a rule there is none: on a CPU a minimum of bytes, 0 wrapping around to 255, tells it ten
    # times as fast as comparing does.
    if codes.device.type == "cpu" and int((codes - _FLOOR).amin()) > 0:
        return None
    below = (codes == _FLOOR) & (task.gradient[part] != 0)
    # A block with a NaN is lost altogether, and its codes say nothing.
    whole = task.tops[1][part.start // BLOCK : part.stop // BLOCK] != BROKEN
    return below & whole.repeat_interleave(BLOCK)[: below.numel()]
