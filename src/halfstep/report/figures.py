"""Draws a report's curves as SVG that follows the page's light or dark colours."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from halfstep.report import N_, gettext
from halfstep.report.compare import flattened
from halfstep.report.findings import COMMANDS
from halfstep.report.record import EventKind, RunRecord

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


Draw = Callable[[Any, Sequence[RunRecord], str], bool]
"""Draws runs into axes, in a language; False where there is nothing to draw."""


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
    if not values:
        return False
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
        training, validation = _measured_as(run, language)
        name = _label(run, runs, training)
        thin = {"color": colour, "alpha": 0.35 if len(runs) > 1 else 0.9}
        drawn |= _plot(axes, run.applied, "loss", label=name, **thin)
        name = _label(run, runs, validation)
        dark = {"color": colour, "marker": "o", "markersize": 3, "linestyle": "--"}
        drawn |= _plot(axes, run, "val_loss", label=name, **dark)
    if drawn:
        _mark(axes, runs, language)
    unit = gettext("loss (nats per target)", language)
    if not all(run.config.get("task") in COMMANDS for run in runs):  # the user's own loss
        unit = gettext("loss", language)
    axes.set_ylabel(unit)
    return drawn


def _measured_as(run: RunRecord, language: str) -> tuple[str, str]:
    """What the curves of training and validation are, with what one has and the other has not."""
    flat = flattened(run.config)
    training, validation = gettext("training", language), gettext("validation", language)
    share = flat.get("model.label_smoothing", "0.0")
    if share != "0.0":
        training = gettext("training, with label smoothing {share}", language).format(share=share)
    if flat.get("run.ema_decay", "0.0") != "0.0":
        validation = gettext("validation, of the averaged weights", language)
    if flat.get("task") == "module":
        validation = gettext("validation, by Trainer(evaluate) if given", language)
    return training, validation


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


def _each(axes: Any, runs: Sequence[RunRecord], key: str, **how: Any) -> bool:
    """Draw a number of each run in which it is ever other than 1."""
    drawn = False
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        if any(value != 1.0 for value in run.series(key)[1]):
            drawn |= _plot(axes, run, key, label=_label(run, runs), color=colour, **how)
    return drawn


def _scale(axes: Any, runs: Sequence[RunRecord], language: str) -> bool:
    drawn = _each(axes, runs, "loss_scale", drawstyle="steps-post")
    if drawn:
        axes.set_yscale("log", base=2)
    return drawn


def _norm(axes: Any, runs: Sequence[RunRecord], language: str) -> bool:
    drawn = _each(axes, runs, "grad_norm")
    if drawn and all(v > 0 for run in runs for v in run.series("grad_norm")[1]):
        axes.set_yscale("log")
    return drawn


def _lost(axes: Any, runs: Sequence[RunRecord], language: str) -> bool:
    drawn = False
    for run, of_run in zip(runs, cycle(COLOURS), strict=False):
        groups = run.groups("lost_updates")
        for i, (group, curve) in enumerate(groups.items()):
            colour, line = of_run, _LINES[i % len(_LINES)]
            name = f"{plain(run.name)}: {plain(group)}"
            if len(runs) == 1:
                colour, line, name = COLOURS[i % len(COLOURS)], "-", plain(group)
            how = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3}
            axes.plot(*curve, label=name, **how)
            drawn = True
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel(gettext("share of updates lost to rounding", language))
    return drawn


def _speed(axes: Any, runs: Sequence[RunRecord], language: str) -> bool:
    drawn = _each(axes, runs, "tokens_per_second")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(gettext("tokens per second", language))
    return drawn


CURVES: dict[str, Draw] = {
    N_("Loss"): _loss,
    N_("Loss scale"): _scale,
    N_("Gradient norm (before clipping)"): _norm,
    N_("Lost updates"): _lost,
    N_("Speed"): _speed,
}
"""A figure's title to the function that draws it."""


def _label(run: RunRecord, runs: Sequence[RunRecord], what: str = "") -> str | None:
    if len(runs) == 1:
        return what or None
    return f"{plain(run.name)} {what}".strip()


def plain(text: str) -> str:
    """A name that matplotlib takes for text: no formula, no hidden label, not endless."""
    shown = "".join(c if c.isprintable() else "?" for c in text.replace("$", r"\$"))
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f" {shown}" if shown.startswith("_") else shown
