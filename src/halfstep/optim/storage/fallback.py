"""Detects tensors whose second moment needs more than 8 bits, and converts them to bf16 moments.

A block of 128 elements shares a window of 32 binades below its largest second moment; that is a
range of gradients down to 2^-16 of the block's largest. A smaller second moment is stored as the
window's lowest number, which is too large. The element's updates, divided by its root, are then too
small, by any factor (measured: 240 at a spread of 10^6). First moments have no such floor; they are
right on average. So each tensor is checked in its steps 8, 16, 32, 64, 96, ...: an element is
counted if its gradient is not 0 and its second moment is at the floor. If at least one element in
16,384 is, or a single one in a smaller tensor, both moments of the tensor become bf16 for good.
docs/decisions/0012-moments-that-fall-back.md explains the threshold, and why whole tensors.

All functions read stored codes, which have the same bits in every kernel, and use torch's own
element-wise operations, so that the decision and its result are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.optim.storage.moments import BLOCK, BROKEN, decode
from halfstep.optim.storage.state import StepTask

FIRST, EVERY = 8, 32
"""A tensor is first checked after FIRST steps, then at each doubling, then every EVERY steps.

Before that, an element whose first gradients are small by chance would be counted.
"""
SHARE = 2.0**-14
"""The share of elements below their windows at which a tensor falls back to bf16."""
_CHUNK = 512 * BLOCK  # elements per chunk: temporaries of less than 1 MB
_FLOOR = 1  # the lowest code that is not 0


def is_due(step: int) -> bool:
    """Whether a tensor is checked after this step of its own, counted from 1."""
    doubled = FIRST <= step < EVERY and step & (step - 1) == 0
    return doubled or (step > 0 and step % EVERY == 0)


def elements_below(tasks: Sequence[StepTask]) -> list[int]:
    """For each task, how many elements with a gradient are at the floor of their window.

    The tasks are on one device, after their step. The host waits for it once.
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
    """Whether a tensor with ``below`` elements below their windows falls back to bf16."""
    return below > 0 and below >= elements * SHARE


def wide_moments(task: StepTask, multiplier: float, correction: float) -> tuple[Tensor, Tensor]:
    """Both moments of a task in bf16, which holds every 8-bit number exactly.

    A second moment at the floor restarts from the current gradient: its true value is lost, and
    the floor would take thousands of steps to decay.

    Args:
        task: A task with 8-bit moments, after its step.
        multiplier: The factor of the gradient.
        correction: ``1 - beta2**step``: the second moment after ``step`` steps with a constant
            gradient, divided by that gradient's square.

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
        g = task.flat_gradient[part].float() * multiplier
        anew = ((g * correction) * g).clamp_(min=smallest)
        first[part].copy_(m)
        below = _below(task, part)
        second[part].copy_(v if below is None else torch.where(below, torch.minimum(v, anew), v))
    return first, second


def _below(task: StepTask, part: slice) -> Tensor | None:
    """A mask of the part's elements that are below their windows; None if there are none."""
    codes = task.moments[1][part]
    # Usually there are none. On a CPU a minimum of bytes, in which 0 - 1 wraps to 255, finds that
    # out ten times as fast as a comparison.
    if codes.device.type == "cpu" and int((codes - _FLOOR).amin()) > 0:
        return None
    below = (codes == _FLOOR) & (task.flat_gradient[part] != 0)
    # In a block with a NaN all elements are lost, and the codes are meaningless.
    whole = task.tops[1][part.start // BLOCK : part.stop // BLOCK] != BROKEN
    return below & whole.repeat_interleave(BLOCK)[: below.numel()]
