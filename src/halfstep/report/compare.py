"""Compares runs by the last step at which all of them were evaluated.

Runs whose configurations differ in their seed alone are repetitions of one *group*, of which the
mean, the standard deviation and the number of runs are shown. What that proves is for the reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from halfstep.report import gettext
from halfstep.report.record import RunRecord

NOT_ARITHMETIC = frozenset(
    f"run.{key}"
    for key in (
        *("seed", "output_dir", "save_every", "keep", "watch", "health_every", "lost_update_every"),
        *("capture", "rank_timeout"),
    )
) | {"name"}
"""Keys that may differ between repetitions of one configuration."""


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several groups by one measure, the best first.

    Attributes:
        measure: ``val_loss``, ``val_accuracy``, or empty where runs cannot be compared.
        step: The last step at which all runs were measured.
        groups: The groups, best first.
        differs: Keys that differ between the groups, with each group's value.
        verdict: What follows, in sentences.
    """

    measure: str
    step: int
    groups: Sequence[Group]
    differs: Mapping[str, Sequence[str]]
    verdict: Sequence[str]


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
    differs = _differences(groups)
    unlike = [k for k in differs if k == "task" or k.startswith("data.") or k == "model.source"]
    measure, step = ("", 0) if unlike else _measure(runs)
    if not measure:
        why = gettext(
            "These runs cannot be ranked: they differ in {keys}, so their losses do not measure "
            "the same thing.",
            language,
        ).format(keys=", ".join(unlike))
        if not unlike:
            why = gettext(
                "These runs cannot be ranked: there is no step at which all of them were "
                "evaluated. Give them the same run.eval_every.",
                language,
            )
        return Comparison("", 0, groups, differs, [why])
    groups = [Group(g.name, g.runs, _values(g.runs, measure, step)) for g in groups]
    sign = -1 if measure == "val_accuracy" else 1
    groups.sort(key=lambda group: math.inf if not group.values else sign * group.mean)
    said = _verdict(groups, measure, step, language)
    return Comparison(measure, step, groups, _differences(groups), said)


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
            found.setdefault(flattened(run.config).get("run.seed", f"run {i}"), value)
    return found


# --- the verdict ----------------------------------------------------------------------------------


def _verdict(groups: Sequence[Group], measure: str, step: int, language: str) -> list[str]:
    broken = [run.name for g in groups for run in g.runs if not _values([run], measure, step)]
    said = []
    if broken:
        text = gettext("No finite validation result at step {step}: {runs}.", language)
        said.append(text.format(runs=", ".join(broken), step=step))
    shown = {g.name: shown_value(g, measure) for g in groups}
    if len(groups) == 1:
        text = gettext(
            "All runs repeat one configuration: {value} at step {step}, mean and standard "
            "deviation over their seeds. A difference from another configuration means something "
            "only beyond that.",
            language,
        )
        return [*said, text.format(value=shown[groups[0].name], step=step)]
    sound = [group for group in groups if group.values]
    for other in sound[1:]:
        best = sound[0]
        values = {"best": best.name, "other": other.name, "step": step}
        values |= {"a": shown[best.name], "b": shown[other.name], "n": len(best.values)}
        values |= {"gap": _digits(abs(other.mean - best.mean)), "m": len(other.values)}
        text = gettext(
            "{best} ({a}; seeds: {n}) is ahead of {other} ({b}; seeds: {m}) by {gap} at step "
            "{step}. Of one seed nobody can tell whether that is more than its noise.",
            language,
        )
        said.append(text.format(**values))
    return said


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def shown_value(group: Group, measure: str) -> str:
    """A group's mean, with its standard deviation where it has one; a dash without values."""
    if not group.values:
        return "-"
    form = "{:.2%}" if measure == "val_accuracy" else "{:.4f}"
    mean = form.format(group.mean)
    return mean if group.spread is None else f"{mean} ± {form.format(group.spread)}"
