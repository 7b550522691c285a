"""Compares runs by the last step at which all of them were evaluated.

Runs whose configurations differ in their seed alone are repetitions of one *group*, of which the
mean, the standard deviation and the number of runs are shown. What that proves is for the reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_OF_THE_LOSS = frozenset({"task", "model.source", "model.vocab_size"})
"""Keys besides those of the data by which a validation loss measures another thing."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one configuration.

    Attributes:
        name: Its precision policy where that tells it from the others, or its first run's name.
        runs: Its runs.
        values: Their measure at the common step, where it is finite. A seed that comes twice counts
            once: it repeats the same numbers.
    """

    name: str
    runs: Sequence[RunRecord]
    values: Sequence[float] = ()


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
    why = _unranked(runs, differs, language)
    if why:
        text = gettext("These runs cannot be ranked: {why}.", language)
        return Comparison("", 0, groups, differs, [text.format(why=why)])
    measure, step = _measure(runs)
    groups = [Group(g.name, g.runs, _values(g.runs, measure, step)) for g in groups]
    sign = -1 if measure == "val_accuracy" else 1
    groups.sort(key=lambda group: sign * fmean(group.values) if group.values else math.inf)
    said = _verdict(groups, measure, step, language)
    return Comparison(measure, step, groups, _differences(groups), said)


def _differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    flat = [flattened(group.runs[0].config) for group in groups]
    keys = dict.fromkeys(key for each in flat for key in each if key not in NOT_ARITHMETIC)
    rows = {key: [each.get(key, "") for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def _unranked(
    runs: Sequence[RunRecord], differs: Mapping[str, Sequence[str]], language: str
) -> str:
    """Why runs cannot be ranked, by what they have recorded; empty where they can be."""
    lacking = [run for run in runs if not _evaluated(run)]
    if lacking:
        return "; ".join(_without_results(run, language) for run in lacking)
    unlike = [k for k in differs if k in _OF_THE_LOSS or k.startswith("data.")]
    # another seed may hold out other examples of the same files
    for name in sorted({n for run in runs for n in run.made_with} - {"model", "base model"}):
        known = [run for run in runs if name in run.made_with]
        held = {(flattened(r.config).get("run.seed"), str(r.made_with[name])) for r in known}
        if not unlike and len(held) > len({seed for seed, _ in held}):
            unlike = [gettext("what their {name} held", language).format(name=name)]
    if unlike:
        text = gettext("they differ in {keys}, so they do not measure the same thing", language)
        return text.format(keys=", ".join(unlike))
    if _measure(runs)[0]:
        return ""
    text = gettext("{run} was evaluated at step {steps}", language)
    steps = [", ".join(map(str, _evaluated(run)[-3:])) for run in runs]
    return "; ".join(text.format(run=r.name, steps=at) for r, at in zip(runs, steps, strict=True))


def _evaluated(run: RunRecord) -> list[int]:
    return run.series("val_loss")[0] or run.series("val_accuracy")[0]


def _without_results(run: RunRecord, language: str) -> str:
    last, planned = run.steps[-1]["step"] if run.steps else 0, run.planned_steps or 0
    every = run.count("eval_every") or planned
    text = gettext("{run} has no validation results", language)
    if last < min(every, planned):
        text = gettext("{run} ended at step {last}, before its first evaluation", language)
    return text.format(run=run.name, last=last)


def _measure(runs: Sequence[RunRecord]) -> tuple[str, int]:
    """The measure that all runs have at a common step, and the last such step."""
    for key in ("val_accuracy", "val_loss"):
        common = set.intersection(*({*run.series(key)[0]} for run in runs))
        if common:
            return key, max(common)
    return "", 0


def _values(runs: Sequence[RunRecord], measure: str, step: int) -> list[float]:
    """The finite values at a step by seed; a run without a seed counts as another one."""
    found: dict[str, float] = {}
    for i, run in enumerate(runs):
        value = dict(zip(*run.series(measure), strict=True))[step]
        if math.isfinite(value):
            found.setdefault(flattened(run.config).get("run.seed", f"run {i}"), value)
    return [*found.values()]


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
        values |= {
            "gap": _digits(abs(fmean(other.values) - fmean(best.values))),
            "m": len(other.values),
        }
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
    mean = form.format(fmean(group.values))
    return mean if len(group.values) < 2 else f"{mean} ± {form.format(stdev(group.values))}"
