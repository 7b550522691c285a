"""Tries choices of formats by short runs, until the cheapest that holds is proved.

1. The knapsack's choice; while it does not hold, the next with half of its gradient error.
2. Layers are given back to the cheapest format, one after the other, where the choice still holds
   without the exception. What is left as an exception is what the loss needs.
3. Trying many choices finds one that held by luck. So the last is proved on seeds that no choice
   was tried on; where it fails, the one before, on the same seeds, which is less sure than 95 %.
   Where all fail, the search goes on with less error on these seeds, and proves on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from halfstep.diagnostics.advise.choice import Choice, Chooser
from halfstep.diagnostics.advise.layers import policy_of
from halfstep.diagnostics.advise.proof import Gap, OutOfTime, Trials
from halfstep.errors import PrecisionError
from halfstep.words import Phrase, Told

_told = Told("halfstep.diagnostics.advise")

_LESS = 0.5
"""By what a gradient error that did not hold is multiplied."""
_NO_ERROR = 1e-9


@dataclass
class Search:
    """Finds the cheapest choice that is proved, or the last one that was tried.

    Attributes:
        chooser: Makes choices.
        trials: Compare them with the reference.
        tolerance: How much higher the loss may be, relative.
        say: Is told what is done.
        chosen: The choice, after ``run``.
        gap: Of its loss; None where no run was made, or the time ended before.
        floor: The least tolerance that the runs could prove; None where no run was made.
        needed: By layer, how much higher the loss is with that layer in the cheapest formats,
            where it was tried and did not hold.
    """

    chooser: Chooser
    trials: Trials
    tolerance: float
    say: Callable[[str], None]
    chosen: Choice = field(default_factory=dict)
    gap: Gap | None = None
    floor: float | None = None
    needed: dict[str, float] = field(default_factory=dict)

    @property
    def proved(self) -> bool:
        """Whether another run's gap stays within the tolerance, at 95 %."""
        return self.gap is not None and self.gap.bound <= self.tolerance

    def run(self, limit: float, *, once: bool) -> Phrase:
        """Search, and say in a clause what was found.

        Args:
            limit: The largest gradient error of the first choice.
            once: Try the first choice alone.

        Raises:
            PrecisionError: If the tolerance lies under the floor.
        """
        self.chosen = self.chooser.choose(limit)
        if not self.trials.steps:
            return _told.phrase("no_run")
        runs = {"seeds": len(self.trials.seeds), "steps": self.trials.steps}
        try:
            self.floor = self.trials.floor()
            if self.tolerance < self.floor:
                known = {"tolerance": self.tolerance, "floor": self.floor}
                raise PrecisionError(_told.phrase("below_floor", **known, **runs))
            limit = math.inf if once else self.tolerance
            self.gap = self._gap_of(self.chosen, self.trials.seeds, limit)
            if not (self.proved or once):
                self._prove_the_cheapest_that_holds()
        except OutOfTime:
            self.gap = None
            return _told.phrase("out_of_time", **runs)
        return _told.phrase("gap", mean=self.gap.mean, bound=self.gap.bound, **runs)

    def _prove_the_cheapest_that_holds(self) -> None:
        seeds = self.trials.seeds
        while self._halve_until_it_holds(seeds):
            fresh = self.trials.after(seeds)
            for choice in [self.chosen, *self._given_back(seeds)][::-1]:
                self.chosen = choice
                if self._holds(fresh):
                    return
            seeds = fresh

    def _halve_until_it_holds(self, seeds: Sequence[int]) -> bool:
        while self._halve():
            if self._holds(seeds):
                return True
        return False

    def _holds(self, seeds: Sequence[int]) -> bool:
        self.gap = self._gap_of(self.chosen, seeds, self.tolerance)
        return self.proved

    def _gap_of(self, choice: Choice, seeds: Sequence[int], limit: float) -> Gap:
        self.say(_told("trying", saved=self.chooser.saved(choice)))
        return self.trials.gap(policy_of(choice, self.chooser.reference), seeds, limit)

    def _halve(self) -> bool:
        """Take the cheapest choice with half of the error; whether there is one."""
        limit, before = self.chooser.error(self.chosen), self.chosen
        while self.chosen == before and limit:
            limit = limit * _LESS if limit > _NO_ERROR else 0.0
            self.chosen = self.chooser.choose(limit)
        return self.chosen != before

    def _given_back(self, seeds: Sequence[int]) -> list[Choice]:
        """Cheaper and cheaper choices that hold, each without one exception more."""
        found: list[Choice] = []
        last, fastest = self.chosen, self.chooser.choose(math.inf)
        runs = 3 * len(seeds)  # one third to try, and two for the proof
        for layer in self.chooser.by_error(fastest):
            choice = {key: (fastest if key[0] == layer else last)[key] for key in last}
            if choice == last:
                continue
            if not self.trials.has_time_for(runs):
                break
            gap = self._gap_of(choice, seeds, self.tolerance)
            if gap.bound <= self.tolerance:
                found.append(choice)
                last = choice
            else:
                self.needed[layer] = gap.mean
        return found
