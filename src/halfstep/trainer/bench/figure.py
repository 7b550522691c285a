"""Draws a measurement of policies: speed with its spread, memory, and loss with its noise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from halfstep.trainer.bench.report import BenchReport
from halfstep.words import Told

_told = Told("halfstep.trainer.bench")
MISSING = _told.phrase("no_figure")


def draw(report: BenchReport, path: Path) -> str:
    """Draw a report with a measured row as PNG or SVG, by the path's suffix.

    Returns:
        A message if matplotlib is missing, and nothing was drawn; else empty.
    """
    try:  # optional dependency
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    rows = report.measured[::-1]  # barh draws from below
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(rows)), layout="constrained")
    speed, memory, loss = figure.subplots(1, 3, sharey=True)
    names = [str(row.policy) for row in rows]
    colours = ["tab:green" if row is report.best else "tab:blue" for row in rows]
    rates = [report.rate(row) for row in rows]
    spread = [[r.median - r.low for r in rates], [r.high - r.median for r in rates]]
    speed.barh(names, [r.median for r in rates], xerr=spread, color=colours, capsize=3)
    speed.set_xlabel(f"{report.unit} per second (median, quartiles)")
    peaks = [row.steps[-1].peak_memory_bytes / 1e6 for row in rows]
    memory.barh(names, peaks, color=colours)
    memory.set_xlabel("peak memory (MB)")
    _draw_losses(report, loss, names, colours)
    best = f"; take {report.best.policy}" if report.best else ""
    figure.suptitle(f"{report.name} {report.where}, {report.timed} steps{best}")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=150, format=path.suffix[1:])
    temporary.replace(path)
    return ""


def _draw_losses(report: BenchReport, axes: Any, names: list[str], colours: list[str]) -> None:
    """Draw losses as points, as they differ little, and the reference's noise as a band."""
    assert report.reference is not None
    losses = [report.loss(row) for row in report.measured[::-1]]
    axes.scatter(losses, range(len(names)), color=colours)
    if math.isfinite(report.noise):
        middle = report.loss(report.reference)
        axes.axvspan(middle - report.noise, middle + report.noise, color="tab:gray", alpha=0.2)
    axes.set_xlabel(f"loss after {report.steps} steps (grey: noise)")
