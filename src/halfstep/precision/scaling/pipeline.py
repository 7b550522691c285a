"""Pipelines: stages of one model on ranks of their own, under schedules that own the backward.

The schedules of ``torch.distributed.pipelining`` run the forward and backward of each micro-batch.
:meth:`Precision.scheduled` does around a schedule what :meth:`Precision.backward` does for a loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from halfstep.errors import PrecisionError
from halfstep.precision.agreement import ManyRanks
from halfstep.precision.scaling.gradients import Gradients, NonFinite, Norm, OneRank, Ranks, Share


class Stages(ManyRanks):
    """Agreement among pipeline stages, each of which holds other parameters of the model.

    The ranks that share a stage agree first, then the stages add up: the loss is the last stage's,
    the norm that of all gradients, and all stages step or none does.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, *, copies: Ranks | None = None
    ) -> None:
        """Join the stages.

        Args:
            group: A process group, or a mesh of one axis, of ranks with one stage each.
            copies: The ranks that have the same stage as this one; None: it is alone.
        """
        super().__init__(group=group, loss_share=1)
        self._copies: Ranks = OneRank() if copies is None else copies

    def bound(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Self:
        """These ranks for one model, of whose stages copies are compared."""
        one = copy.copy(self)
        one._copies = self._copies.bound(named_parameters)
        return one

    def at(self, step: int, applied: int, scale: float) -> None:
        """Where this rank is: steps begun and applied, and its loss scale."""
        super().at(step, applied, scale)
        self._copies.at(step, applied, scale)

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The last stage's loss and the norm over all stages; bit-equal on every rank."""
        try:
            value, length = self._copies.measure(loss, gradients, norm)
        except BaseException:
            super().cannot()
            raise
        of_stage, stage = torch.tensor([value, length], dtype=torch.float64), Share(self._size)
        value, length = super().measure(of_stage[0], {stage: [of_stage[1]]}, lambda some: some[0])
        if value == 0 and math.copysign(1, value) < 0:  # NO_LOSS on every stage
            raise PrecisionError(
                "no stage computed a scaled loss: make the schedule with loss_fn=loss(loss_fn), "
                "where `with precision.scheduled(n) as loss`"
            )
        return value, length

    def agree(self) -> None:
        """Compare all weights of the copies of this stage."""
        self._copies.agree()

    def cannot(self) -> None:
        """Join the stages' :meth:`measure` as one that cannot step."""
        self._copies.cannot()
        super().cannot()

    def leave_out(self) -> None:
        """Leave a step out, which all stages do or none."""
        self._copies.leave_out()
        super().leave_out()

    def worst_(self, marks: Tensor) -> None:
        """The element-wise maximum over all stages and their copies, in place."""
        self._copies.worst_(marks)
        super().worst_(marks)

    def share_of(self, parameter: Tensor) -> Share:
        """Which part of a parameter this rank of a stage holds."""
        return self._copies.share_of(parameter)

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """This stage's findings, and whether other stages have some."""
        found = self._copies.union(found, names)
        nan, inf = self.worst([bool(found.nan), bool(found.inf)])
        other = ("another stage",)
        return NonFinite(found.nan or other * nan, found.inf or other * inf)


NO_LOSS = -0.0
"""A stage's loss where another one computes it: adds nothing, and all of them add up to it."""


class Losses:
    """Scales the losses of a schedule's micro-batches, and adds them up."""

    def __init__(self) -> None:
        self._scale: float | None = None  # while the schedule may run
        self._seen: list[Tensor] = []

    def __call__(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The loss function for a schedule, which may be used in later steps, too."""

        def scaled(*args: Any, **options: Any) -> Tensor:
            if self._scale is None:
                raise PrecisionError("run the schedule inside `with precision.scheduled(n)`")
            loss = loss_fn(*args, **options).float()
            self._seen.append(loss.detach().reshape(()))
            scale = self._scale
            if scale != 1.0 and loss.requires_grad:
                loss.register_hook(lambda gradient: gradient * scale)  # type: ignore[no-untyped-call]
            return loss  # as it is: whoever owns the backward may log it

        return scaled

    @contextmanager
    def running(self, scale: float) -> Iterator[None]:
        """The context for one run of the schedule."""
        self._scale, self._seen = scale, []
        try:
            yield
        finally:
            self._scale = None

    def mean(self, count: int, device: torch.device) -> Tensor:
        """Of so many micro-batches; :data:`NO_LOSS` if this stage computed none."""
        seen, self._seen = self._seen, []
        if not seen:
            return torch.tensor(NO_LOSS, device=device)
        if len(seen) - count not in (0, 1):  # a first run has one more, to infer shapes
            raise PrecisionError(
                f"scheduled({count}): the loss was computed {len(seen)} times; give the schedule's "
                "number of micro-batches"
            )
        return torch.stack(seen[-count:]).mean() + 0.0  # which -0 would not be told from NO_LOSS
