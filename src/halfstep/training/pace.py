"""How fast a run goes: for the metrics' rates, and for the time left."""

from __future__ import annotations

import math

from halfstep.training.environment import gemm_flops_per_second
from halfstep.training.session import Session


class Pace:
    """Remembers the last steps and evaluations."""

    def __init__(self, session: Session) -> None:
        self._session = session
        policy, world = session.precision.policy, session.world
        one = gemm_flops_per_second(policy, session.device) if world.is_main else math.nan
        self.gemm = one * world.size
        self._steps: list[float] = []
        self._evaluations: list[float] = []

    def stepped(self, seconds: float) -> None:
        """Take in the seconds of a step; the last 20 count."""
        self._steps = [*self._steps[-19:], seconds]

    def evaluated(self, seconds: float) -> None:
        """Take in the seconds of an evaluation; the last 5 count."""
        self._evaluations = [*self._evaluations[-4:], seconds]

    def seconds_left(self) -> float:
        """Steps left at the recent median, and evaluations left."""
        run, step = self._session.config.run, self._session.step
        if step >= run.max_steps:
            return 0.0
        per_step = sorted(self._steps)[len(self._steps) // 2]
        steps = run.max_steps - step
        every = run.eval_every or run.max_steps
        evaluations = -(-run.max_steps // every) - step // every
        # Before the first evaluation: a forward is a third of a step's arithmetic.
        per_evaluation = (
            sum(self._evaluations) / len(self._evaluations)
            if self._evaluations
            else per_step / 3 * run.eval_batches
        )
        return steps * per_step + max(evaluations, 0) * per_evaluation
