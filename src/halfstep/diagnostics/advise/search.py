"""Tries choices of formats by short runs, until the cheapest that holds is proved.

1. The knapsack's choice; while it does not hold, the next with half of its gradient error.
2. Layers are given back to the cheapest format, one after the other, where the choice still holds
   without the exception. What is left as an exception is what the loss needs.
3. Trying many choices finds one that held by luck. So at most three are proved, on seeds that no
   choice was tried on: first one that is safer than needed, then the one that held, then the
   cheapest. The first that fails ends the proof, and the one before it is the advice.

Why three, and why the safest first. Let p be the chance that a choice's next gap lies beyond the
tolerance, and f(p) the chance that it passes, which falls with p. Of choices that are proved in an
order that was fixed before, up to the first that fails, one with a p above m is advised only where
the first such choice passes: with a chance of at most f(m). So the next gap of what is advised
lies beyond the tolerance with a chance of at most the sum of ``(m - m before) f(m)`` over the
largest p so far. For normal gaps the integral of f is 5 %, since a prediction bound lies below the
next gap with that chance; the sum over three steps is 3.2 % at most (of two seeds; of more seeds
less). The first choice of all, tried on the first seeds, adds at most 1.9 %, and both together stay
below 5 %; with two seeds a fourth step would not.

**Source:** Maurer, Hothorn and Lehmacher, 1995 (fixed sequences of tests); the sums are computed in
``tests/diagnostics/test_advise_search.py``.
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
_PROVED = 3
"""How many choices are proved at most."""


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
        """Whether another run's gap stays within the tolerance, at 95 % over the whole search."""
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
        if not self._halve_until_it_holds(seeds):
            return
        held, cheaper = self.chosen, self._given_back(seeds)
        self._halve()
        safer, self.chosen = self.chosen, held
        order = [safer, held, *cheaper[-1:]]
        distinct = [choice for at, choice in enumerate(order) if choice not in order[:at]]
        self._prove(distinct[:_PROVED], self.trials.after(seeds))

    def _prove(self, choices: Sequence[Choice], seeds: Sequence[int]) -> None:
        """Advise the last of these choices before the first that fails, the safest first."""
        for number, choice in enumerate(choices):
            try:
                gap = self._gap_of(choice, seeds, self.tolerance)
            except OutOfTime:
                if number:
                    return  # what is proved stays so
                raise
            if number and gap.bound > self.tolerance:
                return
            self.chosen, self.gap = choice, gap
            if not self.proved:
                return

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
        runs = (2 + _PROVED) * len(seeds)  # to try it, and references and choices of the proof
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
