"""Builds a report of runs, and writes it as one HTML page.

The page is one file without scripts or network: figures are SVG inside it, and its own content
policy forbids everything else. Every string of a run is escaped by the template.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from halfstep.files import write_whole
from halfstep.report import N_, gettext
from halfstep.report.findings import COMMANDS, FEW, RunFinding, findings, verdict
from halfstep.report.record import Event, EventKind, RunRecord

NAMES: Mapping[str, str] = {
    "run": N_("Run"),
    "precision": N_("Precision"),
    "steps": N_("Steps"),
    "skipped": N_("Skipped"),
    "first_loss": N_("First loss"),
    "last_loss": N_("Last loss"),
    "val_accuracy": N_("Validation accuracy"),
    "val_loss": N_("Validation loss"),
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

    @property
    def differs(self) -> dict[str, list[str]]:
        """Settings that differ between the runs, with each run's value, in their order."""
        flat = [flattened(row.record.config) for row in self.rows]
        keys = dict.fromkeys(key for each in flat for key in each)
        rows = {key: [each.get(key, "") for each in flat] for key in keys}
        own = ("name", "run.output_dir")  # of any run
        return {k: values for k, values in rows.items() if k not in own and len({*values}) > 1}

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
        """Write the page; whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_html())
        return path


def make_report(runs: Sequence[RunRecord], language: str = "en") -> Report:
    """A report of runs that were read, in a language of the catalogue."""
    rows = [Row(run, verdict(run, language), findings(run), _card(run, language)) for run in runs]
    return Report(rows, language)


def _card(run: RunRecord, language: str) -> dict[str, str]:
    """What a reader wants to know first of a run."""
    planned = run.planned_steps
    card = {
        "run": run.name,
        "precision": run.policy,
        "steps": f"{len(run.steps):,}" + (f" / {planned:,}" if planned else ""),
        "skipped": f"{len(run.skipped):,}",
    }
    said: Sequence[tuple[str, str, Callable[[list[float]], str]]] = (
        ("first_loss", "loss", lambda found: f"{found[0]:.4f}"),
        ("last_loss", "loss", lambda found: f"{found[-1]:.4f}"),
        ("val_loss", "val_loss", lambda found: f"{found[-1]:.4f}"),
        ("val_accuracy", "val_accuracy", lambda found: f"{found[-1]:.2%}"),
        ("speed", "tokens_per_second", lambda found: f"{median(found):,.0f}"),
        ("memory", "peak_memory_bytes", lambda found: f"{max(found) / 1e6:,.0f} MB"),
    )
    for label, key, text_of in said:
        if found := run.series(key)[1]:
            card[label] = text_of(found)
    return {gettext(NAMES[label], language): text for label, text in card.items() if text}


def _range_of(found: Sequence[Event], kind: str) -> dict[str, Any]:
    """What the events of a kind have in common: their number, first and last step and scales."""
    alike = [event for event in found if event.kind == kind and not event.cause]
    if not alike:
        return {}
    scales = [event.loss_scale for event in alike if event.loss_scale is not None] or [1.0]
    ends = {"low": f"{min(scales):g}", "high": f"{max(scales):g}"}
    return {"count": len(alike), "first": alike[0].step, "last": alike[-1].step, **ends}


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


# --- figures --------------------------------------------------------------------------------------

# Colours that matplotlib writes and the page replaces by its own, so that one figure serves both.
INK, PAPER, GRID = "#010203", "#fdfcfb", "#c1c2c3"
# Okabe and Ito's palette, which colour-blind readers can tell apart; the page has a lighter one for
# a dark background.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b57c00", "#56b4e9")
_OF_THE_PAGE = {
    **{INK: "var(--ink)", PAPER: "var(--paper)", GRID: "var(--grid)"},
    **{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)},
}
_LINES = ("-", "--", ":", "-.")


def figures(runs: Sequence[RunRecord], language: str) -> list[tuple[str, str]]:
    """The curves of some runs as titles and SVG without a header; empty without matplotlib."""
    found = []
    for title, draw in CURVES.items():
        figure = new_figure()
        if figure is None:
            return []
        axes = figure.subplots()
        if draw(axes, runs, language):
            styled(axes, gettext("Step", language))
            axes.locator_params(axis="x", integer=True)
            found.append((gettext(title, language), as_svg(figure, salt=title)))
    return found


def new_figure(size: tuple[float, float] = (5.6, 2.9)) -> Any:
    """An empty figure; None without matplotlib."""
    try:  # optional dependency
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return None
    return Canvas(figsize=size, layout="constrained", facecolor=PAPER)


def styled(axes: Any, label: str) -> None:
    """Give drawn axes the look of every figure, and a label to the horizontal one."""
    axes.set_xlabel(label, color=INK)
    axes.set_facecolor("none")
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(colors=INK, which="both")
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        kept = dict(zip(labels, handles, strict=True))
        how = {"frameon": False, "fontsize": 8, "labelcolor": INK}
        if len(kept) > 4:  # it would hide the curves
            how |= {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}
        axes.legend([*kept.values()], [*kept], **how)


def as_svg(figure: Any, salt: str) -> str:
    """A figure as SVG to put into a page: text stays text, colours become the page's."""
    from matplotlib import rc_context

    written = io.StringIO()
    # The page's reader has the fonts: matplotlib need not have a glyph for each character.
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    for ours, pages in _OF_THE_PAGE.items():
        svg = re.sub(re.escape(ours), pages, svg, flags=re.IGNORECASE)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'class="figure"', svg, count=1)


def _plot(axes: Any, run: RunRecord, key: str, **how: Any) -> bool:
    steps, values = run.series(key)
    # matplotlib breaks a line at NaN, and an infinity would take the axis with it
    finite = [value if math.isfinite(value) else math.nan for value in values]
    if all(map(math.isnan, finite)):
        return False
    axes.plot(steps, finite, linewidth=1.2, **how)
    return True


def _loss(axes: Any, runs: Sequence[RunRecord], language: str) -> bool:
    """Losses of training and validation, with marks where a step was skipped or spiked."""
    drawn = False
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        name = _label(run, runs, gettext("training", language))
        thin = {"color": colour, "alpha": 0.35 if len(runs) > 1 else 0.9}
        drawn |= _plot(axes, run.applied, "loss", label=name, **thin)
        name = _label(run, runs, gettext("validation", language))
        dark = {"color": colour, "marker": "o", "markersize": 3, "linestyle": "--"}
        drawn |= _plot(axes, run, "val_loss", label=name, **dark)
    if drawn:
        _mark(axes, runs, language)
    ours = all(run.config.get("task") in COMMANDS for run in runs)
    axes.set_ylabel(gettext(N_("loss (nats per target)") if ours else N_("loss"), language))
    return drawn


_MARKS: Mapping[EventKind, tuple[str, str, float, str]] = {
    "calibration": ("|", "#8a8f98", 0.02, N_("skipped: loss scale calibrating ({count})")),
    "overflow": ("x", "#b57c00", 0.02, N_("skipped: gradient overflow ({count})")),
    "nonfinite": ("X", "#d00000", 0.97, N_("not finite ({count})")),
    "spike": ("v", "#d55e00", 0.97, N_("spike ({count})")),
}
"""An event's kind to its mark, colour, height in the axes, and label."""


def _mark(axes: Any, runs: Sequence[RunRecord], language: str) -> None:
    """Mark skipped steps at the foot of the axes, spikes and what was not finite at their head."""
    found = [event for run in runs for event in run.events]
    for kind, (marker, colour, height, name) in _MARKS.items():
        steps = [event.step for event in found if event.kind == kind]
        if not steps:
            continue
        told = gettext(name, language).format(count=len(steps))
        how = {"marker": marker, "color": colour, "s": 24, "clip_on": False, "zorder": 5}
        where = axes.get_xaxis_transform()
        shown = steps[:: -(len(steps) // 300 + 1)]  # with the last
        axes.scatter(shown, [height] * len(shown), label=told, transform=where, **how)
        # matplotlib leaves marks of such a transform out of its limits
        axes.update_datalim([(step, 0.0) for step in shown], updatey=False)
        axes.autoscale_view(scaley=False)


def _number(axes: Any, runs: Sequence[RunRecord], language: str, key: str) -> bool:
    """Draw a number of each run in which it is ever other than 1, by its logarithm."""
    drawn = False
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        if any(value != 1.0 for value in run.series(key)[1]):
            drawn |= _plot(axes, run, key, label=_label(run, runs), color=colour)
    if drawn and all(v > 0 for run in runs for v in run.series(key)[1]):
        axes.set_yscale("log")
    return drawn


def _lost(axes: Any, runs: Sequence[RunRecord], language: str) -> bool:
    for run, of_run in zip(runs, cycle(COLOURS), strict=False):
        groups = run.groups("lost_updates")
        for i, (group, curve) in enumerate(groups.items()):
            how = {"color": of_run, "linestyle": _LINES[i % len(_LINES)], "marker": "o"}
            axes.plot(*curve, label=_label(run, runs, plain(group)), markersize=3, **how)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel(gettext("share of updates lost to rounding", language))
    return any(run.groups("lost_updates") for run in runs)


CURVES: dict[str, Callable[[Any, Sequence[RunRecord], str], bool]] = {
    N_("Loss"): _loss,
    N_("Loss scale"): partial(_number, key="loss_scale"),
    N_("Gradient norm (before clipping)"): partial(_number, key="grad_norm"),
    N_("Lost updates"): _lost,
}
"""A figure's title to what draws it into axes, in a language; False: there is nothing to draw."""


def _label(run: RunRecord, runs: Sequence[RunRecord], what: str = "") -> str | None:
    if len(runs) == 1:
        return what or None
    return f"{plain(run.name)} {what}".strip()


def plain(text: str) -> str:
    """A name that matplotlib takes for text: no formula, no hidden label, not endless."""
    shown = "".join(c if c.isprintable() else "?" for c in text.replace("$", r"\$"))
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f" {shown}" if shown.startswith("_") else shown
