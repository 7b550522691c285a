"""Which weights a load of the model's state has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision.local import local_part
from halfstep.precision.policy import LOW
from halfstep.precision.rounding import random_bits

# Bytes that are looked at a time: their products take eight times the memory.
_CHUNK = 2**15


class Loaded:
    """A hook before a load of the model's state that remembers which weights it changes.

    A weight that is loaded with the value it has, or that gets it back before the next step, keeps
    what lies behind it. So a resume is exact whether the model or Precision is loaded first, and
    averages may be loaded for an evaluation and the weights again after it.
    """

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        """Names of weights that a load has changed, and what tells their value before it."""

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object
    ) -> None:
        """Note the weights that are about to get another value."""
        for name, parameter in module.named_parameters():
            value = state.get(prefix + name)
            low = parameter.dtype in LOW  # nothing lies behind others
            if low and isinstance(value, Tensor) and name not in self.before:
                own, new = local_part(parameter).detach(), local_part(value).detach()
                if own.shape != new.shape or not torch.equal(new.to(own), own):
                    self.before[name] = _fingerprint(own)

    def changed(self, name: str, visible: Tensor) -> bool:
        """Whether a weight has another value by a load than before it."""
        return name in self.before and self.before[name] != _fingerprint(visible)


def _fingerprint(weight: Tensor) -> int:
    """A number that tells a tensor's bits from others, but for one case in 2^31 at the least."""
    codes = weight.contiguous().view(torch.uint8).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=codes.device)
    for start in range(0, codes.numel(), _CHUNK):
        part = codes[start : start + _CHUNK].long()
        factors = random_bits(0, 0, part.numel(), start=start, device=codes.device)
        total += (part * factors).sum()
    return int(total)
