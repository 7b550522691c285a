"""Trains a policy and its reference side by side, from the same weights on the same batches.

The gap is the relative difference of the mean loss over the last quarter of the steps, one for each
seed, which decides the order of the batches, dropout and the bits of stochastic rounding. What is
bounded is the gap of *one more* seed, for that is what the next run has: Student's t at 95 %,
one-sided, of a prediction (Hahn and Meeker, Statistical Intervals, section 4.8)::

    bound = mean + t(n - 1) * deviation * sqrt(1 + 1 / n)

The *floor* is what the same comparison shows where nothing is to be found: the reference against a
twin of itself, whose weights begin off by a rounding to bf16.
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
_STRIDE = 0x9E3779B1
"""Between the random seeds of two runs, an odd number of 32 bits near 2^32 over the golden ratio:
its multiples stay far apart modulo 2^32, and torch's generator on the CPU takes 32 bits."""


class OutOfTime(Exception):
    """The seconds for proofs are spent."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How much higher a policy's loss is than the reference's, relative.

    Attributes:
        mean: Over the seeds that ran.
        bound: What one more seed's gap stays below, at 95 %; at least the largest that was seen,
            and infinite where a seed was over the limit.
    """

    mean: float
    bound: float


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
        seeds: The seeds on which choices are tried first.
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
    _slowest: float = 0.0

    def after(self, seeds: Sequence[int]) -> range:
        """As many seeds, beyond the largest of these."""
        first = max(seeds) + 1
        return range(first, first + len(seeds))

    def has_time_for(self, runs: int) -> bool:
        """Whether so many runs, each as slow as the slowest, end before the time does."""
        return time.monotonic() + runs * self._slowest < self.until

    def floor(self) -> float:
        """The least tolerance that these runs could prove.

        Raises:
            OutOfTime: If the time ends before.
            PrecisionError: If the reference breaks, or its loss is not above 0.
        """
        for seed in self.seeds[len(self._twins) :]:
            twin = self._loss(self.reference, seed, disturbed=True)
            self._twins.append(twin / self._reference(seed) - 1)
        return _uncertainty(self._twins, 0.0)

    def gap(self, policy: str, seeds: Sequence[int] = (), limit: float = math.inf) -> Gap:
        """Compare a policy with the reference.

        Args:
            policy: As ``Precision`` reads it.
            seeds: Other seeds than the usual ones.
            limit: The gap of a seed from which on no further seed runs.

        Raises:
            OutOfTime: If the time ends before.
            PrecisionError: If the reference breaks, or its loss is not above 0.
        """
        gaps: list[float] = []
        for seed in seeds or self.seeds:
            gaps.append(self.gap_on(seed, policy))
            if gaps[-1] > limit or gaps[-1] == math.inf:
                return Gap(statistics.fmean(gaps), math.inf)
        mean = statistics.fmean(gaps)
        bound = mean + max(_uncertainty(gaps, mean), self.floor())
        return Gap(mean, max(bound, *gaps))

    def gap_on(self, seed: int, policy: str) -> float:
        """The gap of a policy on one seed."""
        return self._loss(policy, seed) / self._reference(seed) - 1

    def _reference(self, seed: int) -> float:
        if seed not in self._references:
            loss = self._loss(self.reference, seed)
            if not loss < math.inf:
                raise PrecisionError(
                    f"the run in {self.reference} to compare with breaks before {self.steps} steps "
                    "are over: give advise an optimizer= with a lower learning rate"
                )
            if loss <= 0:
                raise PrecisionError(
                    f"the loss is {loss:.3g} in {self.reference}; a tolerance is a share of the "
                    "loss, so let loss_fn return one that stays above 0"
                )
            self._references[seed] = loss
        return self._references[seed]

    def _loss(self, policy: str, seed: int, *, disturbed: bool = False) -> float:
        """The mean loss of a run's last quarter; infinite where it cannot go on."""
        began = time.monotonic()
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
        precision.clock.rank = seed % 2**15  # other random bits for each seed
        last = []
        try:
            for step in range(self.steps):
                if time.monotonic() > self.until:
                    raise OutOfTime
                draws = (seed * _STRIDE + step) % 2**32  # no other seed's dropout, steps later
                loss = backward(precision, self.loss_fn, self.batches[order[step]], draws)
                precision.step()
                if 4 * step >= 3 * self.steps:
                    last.append(loss)
        except NonFiniteError:
            return math.inf
        finally:
            precision.close()
        self._slowest = max(self._slowest, time.monotonic() - began)
        mean = statistics.fmean(last)
        return mean if math.isfinite(mean) else math.inf


def _uncertainty(gaps: Sequence[float], mean: float) -> float:
    """How far above the mean one more gap lies at 95 %."""
    count = len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (count - 1))
    return _T95[min(count - 1, len(_T95)) - 1] * deviation * math.sqrt(1 + 1 / count)


@torch.no_grad()
def _disturb_(model: nn.Module, generator: torch.Generator) -> None:
    """Move every weight by at most half a unit in the last place of bf16."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.mul_(1 + _ULP * noise.to(parameter))
