"""What the ranks of a run must agree on before a step: its loss, its norm, and what is broken.

Whether a step is applied depends on the gradients' norm and on the loss. Each rank may hold a part
of the parameters, a share of the batch or both; a decision by its own numbers alone would let one
rank step and another skip, after which their weights and loss scales differ for good. Here every
rank adds its share to the same sum, over all ranks of all mesh axes, in one collective per step:
NaN or inf in anybody's share is NaN or inf in everybody's sum, and so the MAX of the flag.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.gradients import NonFinite

Gradients = Mapping[int, Sequence[Tensor]]
"""Number of ranks with different parts (:func:`halfstep.precision.local.parts_of`) to gradients."""
Norm = Callable[[Sequence[Tensor]], Tensor]


class Ranks(Protocol):
    """The ranks that train one model together; :class:`OneRank` is the null object."""

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The loss of the whole step, and the 2-norm of all its gradients, on the host.

        Args:
            loss: fp32 scalar: this rank's.
            gradients: What this rank holds of the step's gradients.
            norm: Gives the 2-norm of some of them as a scalar tensor.
        """

    def cannot(self) -> None:
        """Take part in :meth:`measure` as one that cannot step; the others then raise, too."""

    def worst(self, marks: Sequence[int]) -> list[int]:
        """The largest of all ranks' marks, place by place; every rank gives as many."""

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """What any rank found; ``names`` are all there are, the same on every rank."""


class OneRank:
    """A run of one process, or of processes that have nothing to do with each other."""

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """This process's own."""
        every = [gradient for some in gradients.values() for gradient in some]
        total = norm(every).to(loss.device)
        value, length = torch.stack([loss.to(total.dtype), total]).tolist()
        return value, length

    def cannot(self) -> None:
        """Nobody waits."""

    def worst(self, marks: Sequence[int]) -> list[int]:
        """The marks."""
        return list(marks)

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """The same."""
        return found


class ManyRanks:
    """All ranks of ``torch.distributed``'s default group; each must call each step."""

    def __init__(self, device: torch.device, *, loss_share: float | None = None) -> None:
        """Take part in the default group, which must exist.

        Args:
            device: Where the ranks' sums are made; one that the group's backend serves.
            loss_share: What a rank's loss counts in the step's. None: 1 / number of ranks, the mean
                of the ranks' losses, as with DDP and FSDP2 by themselves, which average gradients.
                1 where ranks have different parts of a sum.
        """
        self._size = dist.get_world_size()
        self._device = device
        self._loss_share = 1 / self._size if loss_share is None else loss_share

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The sum of the ranks' shares, in fp64; the same bits on every rank.

        A part that ``n`` of the ``size`` ranks hold different parts of is there ``size / n`` times.

        Raises:
            PrecisionError: If another rank cannot step.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        sums[0] = loss.double() * self._loss_share
        for parts, some in gradients.items():
            if some:
                sums[1] += norm(some).double().to(self._device).square() * parts
        dist.all_reduce(sums)
        value, squares, unable = sums.tolist()
        if unable:
            raise PrecisionError(
                f"{unable:g} of {self._size} ranks could not take this step, so none does; the "
                "error that was raised there says why"
            )
        # rounded to fp32, the loss of two ranks is that of two micro-batches on one device
        value = torch.tensor(value, dtype=torch.float32).item()
        return value, math.sqrt(squares / self._size) if squares >= 0 else math.nan

    def cannot(self) -> None:
        """Tell the others, who are in :meth:`measure` or come there."""
        dist.all_reduce(torch.tensor([0, 0, 1], dtype=torch.float64, device=self._device))

    def worst(self, marks: Sequence[int]) -> list[int]:
        """The largest of all ranks' marks, place by place; numbers only, nothing is unpickled."""
        if not marks:
            return []
        table = torch.tensor(marks, dtype=torch.int32, device=self._device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        worst: list[int] = table.tolist()
        return worst

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """NaN goes before inf where ranks found both in one tensor's parts."""
        nan, inf = set(found.nan), set(found.inf)
        marks = self.worst([2 if name in nan else int(name in inf) for name in names])
        marked = list(zip(names, marks, strict=True))
        return NonFinite(
            tuple(name for name, mark in marked if mark == 2),
            tuple(name for name, mark in marked if mark == 1),
        )


def ranks_of_this_process(device: torch.device) -> Ranks:
    """All ranks where ``torch.distributed`` is initialised for several, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ManyRanks(device)
    return OneRank()
