"""Compares runs by the last step at which all of them were evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.report import N_, gettext
from halfstep.report.findings import COMMANDS
from halfstep.report.record import RunRecord

MEASURES = {"val_accuracy": N_("Validation accuracy"), "val_loss": N_("Validation loss")}
"""What runs are ranked by: the first that all have."""
_OF_THE_LOSS = frozenset({"task", "model.source", "model.vocab_size"})
"""Keys besides those of the data by which a validation loss measures another thing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs by one measure, the best first.

    Attributes:
        measure: ``val_loss``, ``val_accuracy``, or empty where runs cannot be compared.
        step: The last step at which all runs were measured.
        values: Each run's name, and its measure at that step as text.
        differs: Keys that differ between the runs, with each run's value, in the order given.
        verdict: What follows, in a sentence.
    """

    measure: str
    step: int
    values: Sequence[tuple[str, str]]
    differs: Mapping[str, Sequence[str]]
    verdict: str


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
    measure, step = _measure(runs)
    differs = _differences(runs)
    why = _unranked(runs, measure, differs, language)
    if why:
        text = gettext("These runs cannot be ranked: {why}.", language)
        shown = {} if "task" in differs else differs  # of which nearly every key differs
        return Comparison("", 0, (), shown, text.format(why=why))
    sign = -1 if measure == "val_accuracy" else 1
    found = [(dict(zip(*run.series(measure), strict=True))[step], run.name) for run in runs]
    found.sort(key=lambda pair: sign * pair[0] if math.isfinite(pair[0]) else math.inf)
    form = "{:.2%}" if measure == "val_accuracy" else "{:.4f}"
    values = [(name, form.format(value)) for value, name in found]
    text = gettext(
        "{measure} at step {step}, best first: {values}. Another seed moves it, too: train several "
        "before a small difference counts.",
        language,
    )
    told = ", ".join(map(" ".join, values))
    said = text.format(measure=gettext(MEASURES[measure], language), step=step, values=told)
    return Comparison(measure, step, values, differs, said)


def _differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    flat = [flattened(run.config) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = {key: [each.get(key, "") for each in flat] for key in keys}
    own = ("name", "run.output_dir")  # of any run
    return {k: values for k, values in rows.items() if k not in own and len({*values}) > 1}


def _unranked(
    runs: Sequence[RunRecord], measure: str, differs: Mapping[str, Sequence[str]], language: str
) -> str:
    """Why runs cannot be ranked, by what they have recorded; empty where they can be."""
    kinds = [COMMANDS.get(str(run.config.get("task")), "") for run in runs]
    if len({*kinds}) > 1:
        text, own = gettext("{run} is a run of {kind}", language), gettext("your program", language)
        named = zip(runs, kinds, strict=True)
        return "; ".join(text.format(run=run.name, kind=kind or own) for run, kind in named)
    lacking = [_lacking(run, language) for run in runs if not _evaluated(run)]
    if lacking:
        return "; ".join(lacking)
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
    if measure:
        return ""
    text = gettext("{run} was last evaluated at step {step} (evaluations: {count})", language)
    steps = [(run.name, _evaluated(run)) for run in runs]
    return "; ".join(text.format(run=name, step=at[-1], count=len(at)) for name, at in steps)


def _evaluated(run: RunRecord) -> list[int]:
    return run.series("val_loss")[0] or run.series("val_accuracy")[0]


def _lacking(run: RunRecord, language: str) -> str:
    last, planned = run.steps[-1]["step"] if run.steps else 0, run.planned_steps or 0
    text = gettext("{run} has no validation results", language)
    if last < min(run.count("eval_every") or planned, planned):
        text = gettext("{run} ended at step {last}, before its first evaluation", language)
    return text.format(run=run.name, last=last)


def _measure(runs: Sequence[RunRecord]) -> tuple[str, int]:
    """The measure that all runs have at a common step, and the last such step."""
    for key in MEASURES:
        common = set.intersection(*({*run.series(key)[0]} for run in runs))
        if common:
            return key, max(common)
    return "", 0
