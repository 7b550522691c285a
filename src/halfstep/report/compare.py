"""Compares runs: which configuration is better, and whether that is more than the seed's noise.

Runs whose configurations differ in their seed alone are repetitions of one *group*. Two groups with
the same seeds began with the same weights and saw the same batches: they are compared seed by seed,
by a paired t-test, otherwise by Welch's, at :data:`ALPHA` for the whole comparison (Bonferroni:
divided by the number of pairs). A group of one run has no spread of its own; it borrows that of the
group that it is compared with. Where no group has repetitions, nothing is decided.

**Source:** Welch, "The generalization of Student's problem when several different population
variances are involved", Biometrika 34 (1947); Student's t: Abramowitz and Stegun, 26.7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from halfstep.report.record import RunRecord
from halfstep.report.words import phrase

ALPHA = 0.05
"""The chance to call equal configurations different, over all pairs together."""
NOT_ARITHMETIC = frozenset(
    f"run.{key}"
    for key in (
        *("seed", "output_dir", "report_to", "save_every", "keep", "watch", "lost_update_every"),
        *(
            "watch_formats",
            "capture",
            "background_save",
            "agree_every",
            "rank_timeout",
            "max_seconds",
        ),
    )
) | {"name"}
"""Keys that may differ between repetitions of one configuration."""


_NO_SEED = "run "


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one configuration.

    Attributes:
        name: Its precision policy where that tells it from the others, or its first run's name.
        runs: Its runs.
        by_seed: Their measure at the common step by seed, where it is finite. A seed that comes
            twice counts once: it repeats the same numbers.
    """

    name: str
    runs: Sequence[RunRecord]
    by_seed: Mapping[str, float] = field(default_factory=dict)

    @property
    def values(self) -> list[float]:
        """The measure of each seed."""
        return [*self.by_seed.values()]

    @property
    def mean(self) -> float:
        """Mean of the runs; NaN without any."""
        return fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float | None:
        """Standard deviation over the runs; None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    def median_of(self, key: str) -> float | None:
        """The median of a number over the steps of all its runs."""
        found = [v for run in self.runs for v in run.series(key)[1] if math.isfinite(v)]
        return median(found) if found else None

    def most_of(self, key: str) -> float | None:
        """The largest of a number over the steps of all its runs."""
        found = [v for run in self.runs for v in run.series(key)[1] if math.isfinite(v)]
        return max(found, default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several groups by one measure, the best first.

    Attributes:
        measure: ``val_loss``, ``val_accuracy``, or empty where runs cannot be compared.
        step: The last step at which all runs were measured.
        groups: The groups, best first.
        differs: Keys that differ between the groups, with each group's value, in ``order``.
        verdict: What follows, in sentences.
        order: The groups' names in the order of the values in ``differs``.
    """

    measure: str
    step: int
    groups: Sequence[Group]
    differs: Mapping[str, Sequence[str]]
    verdict: Sequence[str]
    order: Sequence[str]


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs by configuration, in order of appearance, named so that they can be told apart."""
    found: dict[Any, list[RunRecord]] = {}
    for run in runs:
        flat = {k: v for k, v in flattened(run.config).items() if k not in NOT_ARITHMETIC}
        found.setdefault(tuple(sorted(flat.items())) or (run.name, id(run)), []).append(run)
    groups = [*found.values()]
    policies = [group[0].policy for group in groups]
    unique = len({*policies}) == len(policies) and "?" not in policies
    return [Group(g[0].policy if unique else g[0].name, g) for g in groups]


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested tables as ``table.key`` to a value's text."""
    found: dict[str, str] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            found |= flattened(value, f"{name}.")
        else:
            found[name] = str(value)
    return found


def compare(runs: Sequence[RunRecord], language: str = "en") -> Comparison | None:
    """What several runs say of each other; None for fewer than two."""
    if len(runs) < 2:
        return None
    groups = grouped(runs)
    differs, order = _differences(groups), [group.name for group in groups]
    unlike = [k for k in differs if k == "task" or k.startswith("data.") or k == "model.source"]
    if unlike:
        why = phrase("not_comparable", language, {"keys": ", ".join(unlike)})
        return Comparison("", 0, groups, differs, [why], order)
    measure, step = _measure(runs)
    if not measure:
        return Comparison("", 0, groups, differs, [phrase("no_common_step", language)], order)
    groups = [Group(g.name, g.runs, _values(g.runs, measure, step)) for g in groups]
    sign = -1 if measure == "val_accuracy" else 1
    groups.sort(key=lambda group: math.inf if not group.values else sign * group.mean)
    said = _verdict(groups, measure, step, language)
    return Comparison(measure, step, groups, differs, said, order)


def _differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    flat = [flattened(group.runs[0].config) for group in groups]
    keys = dict.fromkeys(key for each in flat for key in each if key not in NOT_ARITHMETIC)
    rows = {key: [each.get(key, "") for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def _measure(runs: Sequence[RunRecord]) -> tuple[str, int]:
    """The measure that all runs have at a common step, and the last such step."""
    for key in ("val_accuracy", "val_loss"):
        common = set.intersection(*({*run.series(key)[0]} for run in runs))
        if common:
            return key, max(common)
    return "", 0


def _values(runs: Sequence[RunRecord], measure: str, step: int) -> dict[str, float]:
    """The finite values at a step by seed; a run without a seed counts as another one."""
    found: dict[str, float] = {}
    for i, run in enumerate(runs):
        value = dict(zip(*run.series(measure), strict=True))[step]
        if math.isfinite(value):
            found.setdefault(flattened(run.config).get("run.seed", f"{_NO_SEED}{i}"), value)
    return found


# --- the verdict ----------------------------------------------------------------------------------


def _verdict(groups: Sequence[Group], measure: str, step: int, language: str) -> list[str]:
    def say(name: str, **values: Any) -> str:
        return phrase(name, language, values)

    broken = [run.name for g in groups for run in g.runs if not _values([run], measure, step)]
    said = [say("not_finite_at", runs=", ".join(broken), step=step)] if broken else []
    sound = [group for group in groups if group.values]
    shown = {g.name: shown_value(g, measure) for g in groups}
    if len(groups) == 1 and len(groups[0].values) < 2:
        return [*said, say("same_seed")]
    if len(groups) == 1:
        return [*said, say("one_group", value=shown[groups[0].name], step=step)]
    if len(sound) < 2:
        return said
    pairs = len(sound) * (len(sound) - 1) // 2
    best, *others = sound
    for other in others:
        limit = _limit(best, other, ALPHA / pairs)
        gap = abs(other.mean - best.mean)
        values = {"best": best.name, "other": other.name, "step": step}
        values |= {"a": shown[best.name], "b": shown[other.name], "gap": _digits(gap)}
        if limit is None:
            said.append(say("noise_unknown", **values))
        elif gap > limit:
            said.append(say("better", **values, limit=_digits(limit)))
        else:
            said.append(say("within_noise", **values, limit=_digits(limit)))
    return said


def _limit(a: Group, b: Group, alpha: float) -> float | None:
    """The difference of two groups' means from which on it is no noise."""
    one, other = a.by_seed, b.by_seed
    if len(one) > 1 and one.keys() == other.keys() and not any(map(_unknown, one)):
        gaps = [one[seed] - other[seed] for seed in one]
        return quantile(1 - alpha / 2, len(gaps) - 1) * stdev(gaps) / math.sqrt(len(gaps))
    return least_difference(a.values, b.values, alpha)


def _unknown(seed: str) -> bool:
    return seed.startswith(_NO_SEED)


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def shown_value(group: Group, measure: str) -> str:
    """A group's mean, with its standard deviation where it has one; a dash without values."""
    if not group.values:
        return "-"
    form = "{:.2%}" if measure == "val_accuracy" else "{:.4f}"
    mean = form.format(group.mean)
    return mean if group.spread is None else f"{mean} ± {form.format(group.spread)}"


def least_difference(a: Sequence[float], b: Sequence[float], alpha: float) -> float | None:
    """The difference of two means from which on it is no noise; None where nobody can tell.

    With two values and more on both sides it is Welch's; one value alone takes the other side's
    standard deviation, with that side's degrees of freedom.
    """
    if len(a) < 2 and len(b) < 2:
        return None
    if min(len(a), len(b)) == 1:
        many = max(a, b, key=len)
        return quantile(1 - alpha / 2, len(many) - 1) * stdev(many) * math.sqrt(1 + 1 / len(many))
    u, v = stdev(a) ** 2 / len(a), stdev(b) ** 2 / len(b)
    if u + v == 0:
        return 0.0
    freedom = (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))
    return quantile(1 - alpha / 2, freedom) * math.sqrt(u + v)


def quantile(p: float, freedom: float) -> float:
    """The value that Student's t with some degrees of freedom exceeds with probability 1 - p.

    For p in [0.5, 1). With x = tan(angle) * sqrt(freedom) the density becomes cos(angle) to the
    power ``freedom - 1``, which Simpson's rule integrates; bisection inverts it.
    """
    # twice Wallis' integral from 0 to a right angle
    whole = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.sqrt(math.pi)
    wanted, low, high = (p - 0.5) * whole, 0.0, math.pi / 2

    def mass(end: float, parts: int = 200) -> float:
        width = end / parts
        heights = [math.cos(i * width) ** (freedom - 1) for i in range(parts + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return float((heights[0] + inner + heights[-1]) * width / 3)

    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < wanted else (low, middle)
    return math.tan(low) * math.sqrt(freedom)
