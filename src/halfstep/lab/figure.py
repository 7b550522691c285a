"""The look that all figures of the course share, and how one becomes a file."""

from __future__ import annotations

from pathlib import Path

from halfstep.lab.experiment import Made, Say
from halfstep.report.figures import new_figure, save_svg, styled

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

finish = styled


def draw(made: Made, path: Path, language: str) -> bool:
    """Draw an experiment's figure into an SVG file; whether matplotlib is there to do it."""
    figure = new_figure(made.experiment.size)
    if figure is None:
        return False
    say = Say(made.experiment.name, language)
    made.experiment.draw(figure, made.data, say)
    figure.suptitle(say("title"), fontsize=13)
    save_svg(figure, path)
    return True
