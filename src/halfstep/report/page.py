"""Builds a report of runs, and writes it as one HTML page.

The page is one file without scripts or network: figures are SVG inside it, and its own content
policy forbids everything else. Every string of a run is escaped by the template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from halfstep.errors import ConfigError
from halfstep.files import write_whole
from halfstep.report import N_, gettext
from halfstep.report.compare import MEASURES, Comparison, compare, flattened
from halfstep.report.figures import figures
from halfstep.report.findings import FEW, RunFinding, findings, verdict
from halfstep.report.record import Event, RunRecord

NAMES: Mapping[str, str] = {
    "run": N_("Run"),
    "precision": N_("Precision"),
    "steps": N_("Steps"),
    "skipped": N_("Skipped"),
    "first_loss": N_("First loss"),
    "last_loss": N_("Last loss"),
    **MEASURES,
    "speed": N_("Tokens/s (median)"),
    "memory": N_("Peak memory"),
    "nonfinite": N_("not finite"),
    "spike": N_("spike"),
    "overflow": N_("gradient overflow"),
    "calibration": N_("calibration"),
}
"""What a page calls a measure, or a kind of events."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run's part of a report.

    Attributes:
        record: What was read.
        verdict: The run in one line.
        findings: What its user should know, worst first.
        card: Label to value, both as shown.
    """

    record: RunRecord
    verdict: str
    findings: Sequence[RunFinding]
    card: Mapping[str, str]

    @property
    def level(self) -> str:
        """The worst finding's level, or "healthy"."""
        worst = self.findings[0].level if self.findings else "note"
        return "healthy" if worst == "note" and len(self.record.steps) >= FEW else worst


@dataclass(frozen=True, slots=True)
class Report:
    """Runs beside each other, in a language."""

    rows: Sequence[Row]
    language: str
    comparison: Comparison | None = None

    def to_html(self) -> str:
        """One page of HTML that needs nothing else."""
        runs = [row.record for row in self.rows]
        environment = Environment(
            loader=PackageLoader("halfstep.report", "templates"),
            autoescape=True,
            undefined=ChainableUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        said = partial(gettext, language=self.language)
        environment.filters |= {
            "flat": lambda table: [*flattened(table).items()],
            "range_of": _range_of,
        }
        return environment.get_template("page.html.j2").render(
            report=self,
            gettext=said,
            names=NAMES,
            language=self.language,
            figures=[(title, Markup(svg)) for title, svg in figures(runs, self.language)],
        )

    def write(self, path: Path) -> Path:
        """Write the page; whole or not at all.

        Raises:
            ConfigError: If the path's suffix is not .html.
        """
        if path.suffix.lower() != ".html":
            raise ConfigError(f"--out {path}; allowed: a name that ends in .html")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_html())
        return path


def make_report(runs: Sequence[RunRecord], language: str = "en") -> Report:
    """A report of runs that were read, in a language of the catalogue."""
    rows = [Row(run, verdict(run, language), findings(run), _card(run, language)) for run in runs]
    return Report(rows, language, compare(runs, language))


def _card(run: RunRecord, language: str) -> dict[str, str]:
    """What a reader wants to know first of a run."""
    planned = run.planned_steps
    card = {
        "run": run.name,
        "precision": run.policy,
        "steps": f"{len(run.steps):,}" + (f" / {planned:,}" if planned else ""),
        "skipped": f"{len(run.skipped):,}",
    }
    for label, key, which in (
        ("first_loss", "loss", 0),
        ("last_loss", "loss", -1),
        ("val_loss", "val_loss", -1),
    ):
        _, values = run.series(key)
        if values:
            card[label] = f"{values[which]:.4f}"
    _, accuracies = run.series("val_accuracy")
    if accuracies:
        card["val_accuracy"] = f"{accuracies[-1]:.2%}"
    speeds = [value for value in run.series("tokens_per_second")[1] if math.isfinite(value)]
    if speeds:
        card["speed"] = f"{median(speeds):,.0f}"
    peaks = [value for value in run.series("peak_memory_bytes")[1] if math.isfinite(value)]
    if peaks:
        card["memory"] = f"{max(peaks) / 1e6:,.0f} MB"
    return {gettext(NAMES[label], language): text for label, text in card.items() if text}


def _range_of(found: Sequence[Event], kind: str) -> dict[str, Any]:
    """What the events of a kind have in common: their number, first and last step and scales."""
    alike = [event for event in found if event.kind == kind and not event.cause]
    if not alike:
        return {}
    scales = [event.loss_scale for event in alike if event.loss_scale is not None] or [1.0]
    ends = {"low": f"{min(scales):g}", "high": f"{max(scales):g}"}
    return {"count": len(alike), "first": alike[0].step, "last": alike[-1].step, **ends}
