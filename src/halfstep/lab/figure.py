"""The look that all figures of the course share, and how one becomes a file.

A figure must be read on a telephone: it is narrow, its letters are large, and what a curve is
stands beside the curve and not in a legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.lab.experiment import Made, Say
from halfstep.report.figures import INK, new_figure, plain, save_svg, styled

# Okabe and Ito's palette, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color
COLOURS = {
    "fp32": "#000000",
    "tf32": "#56b4e9",
    "bf16": "#0072b2",
    "fp16": "#d55e00",
    "e4m3fn": "#009e73",
    "e5m2": "#cc79a7",
    "e2m1": "#b57c00",
    "bf16-split": "#56b4e9",
    "bf16-kahan": "#cc79a7",
    "bf16-sr": "#009e73",
}
"""One colour for one format or policy, in every figure."""
LETTERS = 11.5
"""Points of a figure's letters: ten pixels of a screen 390 pixels wide, at 6.4 inches."""


def finish(axes: Any, x: str, y: str = "", title: str = "") -> None:
    """Give drawn axes the common look and their names, the vertical one lying above the axis."""
    styled(axes, x)
    axes.tick_params(labelsize=LETTERS)
    axes.xaxis.label.set_fontsize(LETTERS)
    above = "\n".join(part for part in (title, y) if part)
    axes.set_title(above, loc="left", fontsize=LETTERS, color=INK, pad=8)


def band(
    axes: Any, steps: Sequence[int], runs: Sequence[Sequence[float]], *, pale: float, **how: Any
) -> None:
    """Draw the mean of some runs, and their range as a pale band.

    Args:
        axes: Of matplotlib.
        steps: Where each run has its numbers.
        runs: One for each seed.
        pale: The opacity of the band.
        **how: Properties of the mean's line; ``color`` is that of both.
    """
    curves = torch.tensor(runs, dtype=torch.float64)
    low, high = curves.min(0).values, curves.max(0).values
    axes.fill_between(steps, low, high, color=how["color"], alpha=pale, lw=0)
    axes.plot(steps, curves.mean(0), **how)


def note(
    axes: Any,
    text: str,
    at: tuple[float, float],
    to: tuple[float, float] | None = None,
    *,
    colour: str = INK,
    **how: Any,
) -> None:
    """Write beside what it is about, in its colour; with an arrow if it stands apart.

    Args:
        axes: Of matplotlib.
        text: What to say.
        at: Where it stands, in data, or in what ``textcoords`` says.
        to: Where the arrow points, in data; None: no arrow.
        colour: Of letters and arrow.
        **how: Properties of the text.
    """
    how = {"fontsize": LETTERS, "color": colour, "zorder": 9, **how}
    if to is None:
        how.pop("textcoords", None)
        axes.annotate(plain_lines(text), at, **how)
        return
    arrow = {"arrowstyle": "->", "color": colour, "lw": 1.3, "shrinkA": 2, "shrinkB": 3}
    axes.annotate(plain_lines(text), to, xytext=at, arrowprops=arrow, **how)


def at_end(axes: Any, length: float, row: float, text: str, colour: str = INK) -> None:
    """Write beside the end of a horizontal bar; a leading blank would be lost in SVG."""
    how = {"xycoords": "data", "textcoords": "offset points", "va": "center", "color": colour}
    axes.annotate(text, (length, row), (5, 0), fontsize=LETTERS - 1.5, **how)


def plain_lines(text: str) -> str:
    """Text that matplotlib takes as it is, line by line."""
    return "\n".join(plain(line) for line in text.split("\n"))


def power(exponent: float) -> str:
    """``2⁻²⁴`` for -24; a tenth where it is no integer."""
    shown = f"{exponent:.0f}" if math.isclose(exponent, round(exponent)) else f"{exponent:.1f}"
    return "2" + shown.translate(str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹˙"))


def draw(made: Made, path: Path, language: str) -> bool:
    """Draw an experiment's figure into an SVG file; whether matplotlib is there to do it."""
    figure = drawn(made, language)
    if figure is None:
        return False
    save_svg(figure, path)
    return True


def drawn(made: Made, language: str) -> Any:
    """An experiment's figure; None without matplotlib."""
    figure = new_figure(made.experiment.size)
    if figure is None:
        return None
    say = Say(made.experiment.name, language)
    made.experiment.draw(figure, made.data, say)
    title = figure.suptitle(say("title"), x=0.02, ha="left", fontsize=LETTERS + 1.5)
    title.set(color=INK, fontweight="bold")
    return figure
