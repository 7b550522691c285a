"""The search for the cheapest formats that hold, with losses that are known."""

import math

import numpy as np
import pytest
from scipy import stats

from halfstep.diagnostics.advise.choice import Chooser, rates_of
from halfstep.diagnostics.advise.proof import _T95, Gap, OutOfTime, Trials, _uncertainty
from halfstep.diagnostics.advise.search import Search
from halfstep.diagnostics.advise.sensitivity import Sensitivity
from halfstep.errors import PrecisionError
from halfstep.precision.policy.recipe import PRODUCTS
from halfstep.precision.policy.spelling import parse_policy

TOLERANCE = 0.05


class Known:
    """Trials whose gaps are the sum of what each layer in NVFP4 costs, without noise."""

    steps, seeds, after = 10, (0, 1, 2), Trials.after

    def __init__(self, costs, *, floor=0.001, lucky=(), time_for=math.inf):
        self.costs, self._floor, self.lucky, self.time_for = costs, floor, lucky, time_for
        self.tried = []

    def floor(self):
        return self._floor

    def has_time_for(self, runs):
        return runs <= self.time_for

    def gap(self, policy, seeds, limit):
        low = {pattern for pattern, _ in parse_policy(policy).rules}
        self.tried.append((low, tuple(seeds)))
        if self.time_for == 0:
            raise OutOfTime
        gap = sum(cost for name, cost in self.costs.items() if name in low)
        if low in self.lucky and tuple(seeds) == self.seeds:
            gap = 0.0
        return Gap(gap, math.inf if gap > limit else gap + self._floor)


def search(costs, errors, tolerance=TOLERANCE, **given):
    rows = []
    for name, error in errors.items():
        for product in PRODUCTS:
            rows.append(Sensitivity(name, product, "bf16", 0.0, 0.0, 0.0, 100))
            rows.append(Sensitivity(name, product, "nvfp4", error, 0.0, 0.0, 100))
    chooser = Chooser(rows, rates_of("b200", ("bf16", "nvfp4")))
    return Search(chooser, Known(costs, **given), tolerance, lambda text: None)


def kept(found):
    return {layer for (layer, _), form in found.chosen.items() if form == "bf16"}


NAMES = "abcdefgh"
HURT = {"b": 0.2, "e": 0.3, "f": 0.1}


def test_what_the_loss_needs_is_kept_though_gradients_say_otherwise():
    """Layers a and h err most and cost nothing: halving keeps them, and they are given back."""
    errors = dict.fromkeys(NAMES, 0.01) | {"a": 3.0, "h": 2.0, "b": 1.0, "e": 1.0, "f": 1.0}
    found = search(HURT, errors)
    found.run(math.inf, once=False)
    assert found.proved
    assert kept(found) == {"b", "e", "f"}
    assert found.trials.tried[-1] == ({"a", "c", "d", "g", "h"}, (3, 4, 5))
    assert set(found.needed) == {"b", "e", "f"}
    assert found.needed["e"] == pytest.approx(0.3)


def test_luck_on_the_seeds_that_chose_is_found_out_on_others():
    errors = dict.fromkeys(NAMES, 0.01) | dict.fromkeys(HURT, 1.0)
    lucky = set(NAMES) - {"b", "e"}
    found = search(HURT, errors, lucky=[lucky])
    found.run(math.inf, once=False)
    assert found.proved
    assert kept(found) == {"b", "e", "f"}
    assert (lucky, (3, 4, 5)) in found.trials.tried
    # where luck began, nothing cheaper was known to hold: the search begins anew on those seeds
    found = search(HURT | {"a": 0.06}, errors | {"b": 2.0, "e": 2.0}, lucky=[lucky])
    found.run(math.inf, once=False)
    assert found.proved
    assert kept(found) == {"a", "b", "e", "f"}
    assert found.trials.tried[-1][1] == (6, 7, 8)


def test_the_first_choice_that_holds_needs_no_other_seeds():
    found = search({}, dict.fromkeys(NAMES, 0.01))
    found.run(math.inf, once=False)
    assert found.proved
    assert kept(found) == set()
    assert len(found.trials.tried) == 1


def test_where_nothing_but_the_reference_holds_the_reference_is_advised():
    found = search(dict.fromkeys(NAMES, 1.0), dict.fromkeys(NAMES, 1.0))
    found.run(math.inf, once=False)
    assert found.proved
    assert kept(found) == set(NAMES)


def test_a_reference_that_does_not_repeat_itself_ends_the_search():
    """Nothing holds, as where a device's sums differ from run to run by more than the tolerance."""
    found = search({}, dict.fromkeys(NAMES, 1.0))
    found.trials.gap = lambda policy, seeds, limit: Gap(0.1, math.inf)
    found.run(math.inf, once=False)
    assert not found.proved
    assert kept(found) == set(NAMES)


def test_without_time_exceptions_stay_and_without_any_it_is_unproved():
    errors = dict.fromkeys(NAMES, 0.01) | {"a": 3.0, "b": 1.0, "e": 1.0, "f": 1.0}
    found = search(HURT, errors, time_for=8)  # three seeds tried and proved are nine runs
    found.run(math.inf, once=False)
    assert found.proved
    assert kept(found) == {"a", "b", "e", "f"}
    found = search(HURT, errors, time_for=0)
    assert "the time ended" in found.run(math.inf, once=False)
    assert not found.proved
    with pytest.raises(PrecisionError, match="lies under the noise floor of 3 seeds of 10 steps"):
        search(HURT, errors, tolerance=0.0001).run(math.inf, once=False)


def test_one_more_gap_stays_below_the_bound_in_19_of_20():
    rng = np.random.default_rng(0)
    for count in (2, 3, 5):
        draws = rng.normal(0.02, 0.01, (20_000, count + 1))
        bounds = [row.mean() + _uncertainty(row, row.mean()) for row in draws[:, :count]]
        # the share is binomial, with a deviation of 0.0015
        assert np.mean(draws[:, count] <= bounds) == pytest.approx(0.95, abs=0.006)
    table = [stats.t.ppf(0.95, free) for free in range(1, len(_T95) + 1)]
    assert pytest.approx(table, abs=6e-4) == _T95
