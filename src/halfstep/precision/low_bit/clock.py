"""The step that a run is at, on which recipes below 16 bits depend."""

from __future__ import annotations

import torch.distributed as dist

from halfstep.errors import PrecisionError
from halfstep.precision.low_bit.delayed import AmaxHistory
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.recipe import Recipe


class Clock:
    """Says what recipes and random bits are at a step.

    Attributes:
        step: How many steps have been taken or skipped; the owner counts.
        history: What delayed scaling goes by; None where nobody trains, or no scheme needs it.

    Args:
        policy: Its schedule counts.
        steps: How many steps the run will have; 0 where nobody trains.
        rank: Which part of each batch this process sees, so that ranks draw other bits.

    Raises:
        PrecisionError: If ``steps`` is no number of steps.
    """

    def __init__(self, policy: PrecisionPolicy, *, steps: int = 0, rank: int = 0) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise PrecisionError(f"steps={steps!r}; allowed: the number of the run's steps")
        self.schedule, self.steps, self.rank, self.step = policy.schedule, steps, rank, 0
        self.history: AmaxHistory | None = None
        self._drawn: dict[int, int] = {}
        self._drawn_at = 0

    def recipe(self, recipe: Recipe) -> Recipe:
        """What a layer's recipe is at this step, by the schedule; at its end without a run."""
        for switch in self.schedule:
            if 100 * self.step >= switch.percent * self.steps:
                recipe = switch.recipe.over(recipe)
        return recipe

    def draw(self, stream: int) -> tuple[int, int, int]:
        """Seed, step and stream of random bits: others for each step, rank and micro-batch."""
        if self._drawn_at != self.step:
            self._drawn.clear()
            self._drawn_at = self.step
        drawn = self._drawn.get(stream, 0)
        self._drawn[stream] = drawn + 1
        return drawn + (self.rank << 16), self.step, stream


class CopiedClock(Clock):
    """The clock of a copy of a model: the run's step and scales, of which a copy changes nothing.

    Args:
        run: The clock of the model that was copied.
    """

    def __init__(self, run: Clock) -> None:
        self.run: Clock = run.run if isinstance(run, CopiedClock) else run
        self.rank = self.run.rank
        self.history = None if self.run.history is None else self.run.history.for_copy()
        self._drawn, self._drawn_at = {}, 0

    def recipe(self, recipe: Recipe) -> Recipe:
        """What a layer's recipe is at the run's step."""
        return self.run.recipe(recipe)

    def draw(self, stream: int) -> tuple[int, int, int]:
        """The random bits of the run's step, counted apart from the run's own."""
        self.step = self.run.step
        return super().draw(stream)


def make_clock(policy: PrecisionPolicy, steps: int | None) -> Clock:
    """The clock of a training run.

    Raises:
        PrecisionError: If the policy has a schedule, and nobody said how long the run is.
    """
    if policy.schedule and not steps:
        raise PrecisionError(
            f"policy {policy} changes recipes at shares of the run: say how many optimizer steps "
            "it will take, as Precision(..., steps=1500)"
        )
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    clock = Clock(policy, steps=steps or 0, rank=rank)
    length = max((scheme.history for scheme in policy.schemes()), default=0)
    clock.history = AmaxHistory(length) if length else None
    return clock
