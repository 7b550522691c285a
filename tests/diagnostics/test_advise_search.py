"""The search for the cheapest formats that hold, with losses that are known."""

import math

import numpy as np
import pytest
from scipy import stats

from halfstep.diagnostics.advise.choice import Chooser, rates_of
from halfstep.diagnostics.advise.layers import policy_of
from halfstep.diagnostics.advise.proof import _T95, Gap, OutOfTime, Trials, _uncertainty
from halfstep.diagnostics.advise.search import _PROVED, Search
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


def lowered(found):
    return {layer for (layer, _), form in found.chosen.items() if form != "bf16"}


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
    # where the safest fails as well, nothing is proved, and no other seeds are asked until one is
    found = search(HURT | {"a": 0.06}, errors | {"b": 2.0, "e": 2.0}, lucky=[lucky])
    found.run(math.inf, once=False)
    assert not found.proved
    assert [seeds for _, seeds in found.trials.tried].count((3, 4, 5)) == 1
    assert {seeds for _, seeds in found.trials.tried} == {(0, 1, 2), (3, 4, 5)}


def test_the_safest_is_proved_first_and_the_first_failure_ends_the_proof():
    errors = dict.fromkeys(NAMES, 0.01) | {"a": 3.0, "h": 2.0, "b": 1.0, "e": 1.0, "f": 1.0}
    found = search(HURT, errors)
    found.run(math.inf, once=False)
    proofs = [low for low, seeds in found.trials.tried if seeds == (3, 4, 5)]
    assert 2 <= len(proofs) <= 3
    error = [sum(errors[name] for name in low) for low in proofs]
    assert error == sorted(error)
    assert len(set(error)) == len(error)

    cheapest = proofs[-1]
    gap = found.trials.gap

    def fails_anew(policy, seeds, limit):
        seen = gap(policy, seeds, limit)
        broken = found.trials.tried[-1] == (cheapest, (3, 4, 5))
        return Gap(1.0, math.inf) if broken else seen

    found = search(HURT, errors)
    gap, found.trials.gap = found.trials.gap, fails_anew
    found.run(math.inf, once=False)
    assert found.proved
    assert lowered(found) == proofs[-2]
    assert found.trials.tried[-1] == (cheapest, (3, 4, 5))


def test_what_is_proved_stays_so_when_the_time_ends():
    errors = dict.fromkeys(NAMES, 0.01) | {"a": 3.0, "h": 2.0, "b": 1.0, "e": 1.0, "f": 1.0}
    found = search(HURT, errors)
    gap = found.trials.gap

    def ends(policy, seeds, limit):
        if [seeds for _, seeds in found.trials.tried].count((3, 4, 5)) == 1:
            raise OutOfTime
        return gap(policy, seeds, limit)

    found.trials.gap = ends
    assert "at 95 %" in found.run(math.inf, once=False)
    assert found.proved
    low, seeds = found.trials.tried[-1]
    assert (lowered(found), (3, 4, 5)) == (low, seeds)


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


def passes(beyond, count):
    """The chance that a choice passes whose next gap lies beyond the tolerance with a chance."""
    ratio = stats.t.ppf(0.95, count - 1) * math.sqrt(1 + 1 / count)
    within = stats.norm.ppf(1 - beyond)
    root = math.sqrt(count)
    return stats.nct.sf(ratio * root, count - 1, within * root)


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_the_whole_search_is_wrong_in_one_of_20_at_most(count):
    """The first choice, then three in a fixed order; four would be too many where seeds are two."""
    beyond = np.linspace(0.001, 0.999, 999)
    passing = passes(beyond, count)
    assert np.all(np.diff(passing) < 1e-12)  # it falls, but for the last bits of fp64
    # a prediction bound lies below the next gap in one of 20; the sum is off by its grid
    assert np.trapezoid(passing, beyond) == pytest.approx(0.05, abs=0.002)
    worst = np.zeros_like(beyond)  # of the steps still to come, by the largest chance so far
    totals = []
    for _ in range(_PROVED + 1):
        more = [((beyond[i:] - b) * passing[i:] + worst[i:]).max() for i, b in enumerate(beyond)]
        worst = np.array(more)
        proof = worst[0] + beyond[0]
        totals.append((passing * beyond + (1 - passing) * proof).max())
    assert totals[_PROVED - 1] < 0.05
    assert totals[_PROVED] > 0.05 or count > 2


class Lucky(Known):
    """Trials whose first seeds show what layer p costs alone; on others every gap scatters."""

    def __init__(self, beyond, generator):
        super().__init__({"p": 0.2}, floor=0.0)
        self.generator, self.drawn = generator, {}
        self.mean = TOLERANCE - 0.01 * stats.norm.ppf(1 - beyond)

    def gap(self, policy, seeds, limit):
        if tuple(seeds) == self.seeds:
            return super().gap(policy, seeds, limit)
        gaps = [self.one(policy, seed) for seed in seeds]
        mean = float(np.mean(gaps))
        bound = math.inf if max(gaps) > limit else max(mean + _uncertainty(gaps, mean), *gaps)
        return Gap(mean, bound)

    def one(self, policy, seed):
        if "rules" not in policy:  # the reference
            return 0.0
        if (policy, seed) not in self.drawn:
            self.drawn[policy, seed] = self.generator.normal(self.mean, 0.01)
        return self.drawn[policy, seed]


@pytest.mark.parametrize("beyond", [0.1, 0.2])
def test_a_proved_choice_breaks_its_promise_in_one_search_of_20_at_most(beyond):
    """16 choices hold on the first seeds, each is beyond at times; 43 and 51 of 400 before."""
    errors = dict.fromkeys("abcdefghijklmno", 1.0) | {"p": 0.1}
    generator, wrong, searches = np.random.default_rng(0), 0, 400
    for _ in range(searches):
        found = search({}, errors)
        found.trials = trials = Lucky(beyond, generator)
        found.run(math.inf, once=False)
        next_gap = trials.one(policy_of(found.chosen, found.chooser.reference), 1000)
        wrong += found.proved and next_gap > TOLERANCE
    # binomial, with a deviation of 0.011 where the chance is 0.05; three of them
    assert wrong / searches < 0.05 + 0.033


def test_one_more_gap_stays_below_the_bound_in_19_of_20():
    rng = np.random.default_rng(0)
    for count in (2, 3, 5):
        draws = rng.normal(0.02, 0.01, (20_000, count + 1))
        bounds = [row.mean() + _uncertainty(row, row.mean()) for row in draws[:, :count]]
        # the share is binomial, with a deviation of 0.0015
        assert np.mean(draws[:, count] <= bounds) == pytest.approx(0.95, abs=0.006)
    table = [stats.t.ppf(0.95, free) for free in range(1, len(_T95) + 1)]
    assert pytest.approx(table, abs=6e-4) == _T95
