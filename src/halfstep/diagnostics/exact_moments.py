"""Second moments of the sampled elements in fp32, beside an optimizer that keeps them in less.

A meter that replays a step from the stored moments sees what weights lose and not what moments
lose: an element whose second moment 8 bits hold too large is moved too little, and its replay too.
So the second moment of the sampled elements is averaged in fp32 at every step, from the gradients
that the step is given. It costs the gathering of a few thousand gradients and no waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.diagnostics.intended_update import plain
from halfstep.diagnostics.sampling import Chooser, in_memory, local
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.moments import BLOCK, decode_elements
from halfstep.optim.state import stored_moment

_Place = tuple[int, int]  # number of the group, and of the tensor in it


class ExactMoments:
    """fp32 second moments of the sampled elements of groups that keep them in less than fp32."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self._values: dict[_Place, Tensor] = {}
        self._index: dict[_Place, Tensor] = {}
        self._steps: dict[_Place, Tensor | None] = {}

    def get(self, place: _Place) -> Tensor | None:
        """The moments after the last step, fp32 of shape (k,); None where fp32 itself is kept."""
        return self._values.get(place)

    def prepare(self, optimizer: Optimizer) -> None:
        """Before a step: start from the stored moments where these do not follow from the last.

        That is so at the first step, and where somebody has loaded a state or changed parameters:
        the step counter is another tensor then.
        """
        for number, group in enumerate(optimizer.param_groups):
            if not _is_coarse(optimizer, group):
                continue
            for j, parameter in enumerate(group["params"]):
                state, place = optimizer.state.get(parameter, {}), (number, j)
                step = state.get("step")
                index = self._index.get(place)
                if (
                    index is None
                    or step is not self._steps[place]
                    or index.device != parameter.device
                ):
                    total = sum(local(p).numel() for p in group["params"])
                    self._index[place] = self._choose(place, local(parameter.detach()), total)
                    self._values[place] = _stored(state, self._index[place])
                    self._steps[place] = step

    def update(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        """After a step: average the gradients that it was given into the moments.

        Args:
            optimizer: That has stepped, one of halfstep's.
            kwargs: The keyword arguments of its ``step``.
        """
        if not self._values:
            return
        given = kwargs.get("gradients")
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for number, group in enumerate(optimizer.param_groups):
            # One gathering per tensor, and all else once per group and dtype: this runs every step.
            gathered: dict[torch.dtype, list[tuple[_Place, Tensor]]] = {}
            for j, parameter in enumerate(group["params"]):
                index = self._index.get((number, j))
                gradient = parameter.grad if given is None else given.get(parameter)
                if index is not None and gradient is not None:
                    chosen = torch.take(local(gradient), index)
                    gathered.setdefault(chosen.dtype, []).append(((number, j), chosen))
                    self._steps[number, j] = optimizer.state[parameter].get("step")
            for members in gathered.values():
                places, parts = zip(*members, strict=True)
                g = torch.cat(parts).float() * kwargs.get("multiplier", 1.0)
                if scale is not None:
                    g = g / scale
                beta2 = plain(group["betas"])[1]
                before = torch.cat([self._values[place] for place in places])
                after = torch.addcmul(before * beta2, g * (1 - beta2), g)
                if found is not None:  # a step that does nothing
                    after = torch.where(found > 0, before, after)
                kept = torch.split(after, [len(part) for part in parts])
                self._values.update(zip(places, kept, strict=True))


def _is_coarse(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a group's second moments are kept in less than fp32."""
    if not isinstance(optimizer, LowPrecisionOptimizer):
        return False
    return len(optimizer.algorithm.moments) > 1 and group["moments"] not in (None, "fp32")


def _stored(state: Mapping[str, Any], index: Tensor) -> Tensor:
    """The optimizer's own second moments of some elements, as fp32."""
    values, tops = stored_moment(state, "exp_avg_sq")
    if values is None:
        return torch.zeros(index.shape, device=index.device)
    taken = torch.take(local(values), index)
    if tops is None:
        return taken.float()
    return decode_elements(
        taken, torch.take(tops, in_memory(index, local(values)) // BLOCK), signed=False
    )
