"""Trains a policy and its reference side by side, from the same weights on the same batches.

The gap is the relative difference of the mean loss over the last quarter of the steps, averaged
over seeds, which decide the order of the batches. The *floor* is what the same comparison shows
where nothing is to be found: the reference against a twin of itself, whose weights begin off by a
rounding to bf16. Both are judged by Student's t at 95 %, one-sided.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from halfstep.diagnostics.advise.layers import LossFn, backward
from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.step import Precision

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Student's t, one-sided 95 %, for 1, 2, ... degrees of freedom."""
_ULP = 2.0**-8


class OutOfTime(Exception):
    """The seconds for proofs are spent."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How much higher a policy's loss is than the reference's, relative: mean and bound."""

    mean: float
    bound: float
    """The mean and its uncertainty at 95 %."""


@dataclass
class Trials:
    """Short runs of one model.

    Attributes:
        model: Where every run begins; not changed.
        batches: Taken in an order that the seed decides, again and again.
        loss_fn: From model and batch to the mean loss.
        optimizer: Makes the optimizer of a run.
        reference: The policy to compare with.
        steps: Steps of each run.
        seeds: The seed of each pair of runs.
        until: When to end, by ``time.monotonic``.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss_fn: LossFn
    optimizer: MakeOptimizer
    reference: str
    steps: int
    seeds: Sequence[int]
    until: float = math.inf
    _references: dict[int, float] = field(default_factory=dict)
    _twins: list[float] = field(default_factory=list)

    def floor(self) -> float:
        """The least tolerance that these runs could prove.

        Raises:
            OutOfTime: If the time ends before.
            PrecisionError: If the reference itself does not come to the end.
        """
        for seed in self.seeds[len(self._twins) :]:
            twin = self._loss(self.reference, seed, disturbed=True)
            self._twins.append(twin / self._reference(seed) - 1)
        return self._uncertainty(self._twins, 0.0)

    def gap(self, policy: str) -> Gap:
        """Compare a policy with the reference.

        Raises:
            OutOfTime: If the time ends before.
            PrecisionError: If the reference itself does not come to the end.
        """
        gaps = [self._loss(policy, s) / self._reference(s) - 1 for s in self.seeds]
        mean = statistics.fmean(gaps)
        if not math.isfinite(mean):
            return Gap(math.inf, math.inf)
        return Gap(mean, mean + max(self._uncertainty(gaps, mean), self.floor()))

    def _uncertainty(self, gaps: Sequence[float], mean: float) -> float:
        free = len(gaps) - 1
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / free)
        return _T95[min(free, len(_T95)) - 1] * spread / math.sqrt(len(gaps))

    def _reference(self, seed: int) -> float:
        if seed not in self._references:
            loss = self._loss(self.reference, seed)
            if not loss < math.inf:
                raise PrecisionError(
                    f"the run in {self.reference} to compare with breaks before {self.steps} steps "
                    "are over: give advise an optimizer= with a lower learning rate"
                )
            self._references[seed] = loss
        return self._references[seed]

    def _loss(self, policy: str, seed: int, *, disturbed: bool = False) -> float:
        """The mean loss of a run's last quarter; infinite where it cannot go on."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        order = [
            number
            for _ in range(-(-self.steps // len(self.batches)))
            for number in torch.randperm(len(self.batches), generator=generator).tolist()
        ]
        if disturbed:
            _disturb_(model, generator)
        trained = [p for p in model.parameters() if p.requires_grad]
        precision = Precision(policy, model, self.optimizer(trained))
        last = []
        try:
            for step in range(self.steps):
                if time.monotonic() > self.until:
                    raise OutOfTime
                loss = backward(precision, self.loss_fn, self.batches[order[step]], seed + step)
                precision.step()
                if 4 * step >= 3 * self.steps:
                    last.append(loss)
        except NonFiniteError:
            return math.inf
        finally:
            precision.close()
        mean = statistics.fmean(last)
        return mean if math.isfinite(mean) else math.inf


@torch.no_grad()
def _disturb_(model: nn.Module, generator: torch.Generator) -> None:
    """Move every weight by at most half a unit in the last place of bf16."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.mul_(1 + _ULP * noise.to(parameter))
