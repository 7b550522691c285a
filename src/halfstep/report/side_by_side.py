"""Shows one training in several precisions: curves that lie on each other, speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.report.figures import (
    COLOURS,
    INK,
    fonts_of,
    new_figure,
    save_png,
    save_svg,
    styled,
)
from halfstep.report.translation import gettext

_WIDTHS = (6.0, 3.2, 1.2)
"""Of the first curve to the last one, so that each is seen below the next."""
_SIZE = (7.6, 3.5)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One precision's training.

    Attributes:
        precision: The policy.
        simulated: Whether the device has no instructions for its products.
        steps: The numbers of the steps.
        losses: The training loss of each, in nats per target.
        val_loss: The validation loss after the last one.
        rate: Median of the steps' tokens per second.
        quartiles: The lower and the upper quartile of them.
        peak_bytes: Peak memory, counted from after the preparation of data.
        skipped: Steps that did not update the weights.
        seconds: From the start of its process to the end.
    """

    precision: str
    simulated: bool
    steps: Sequence[int]
    losses: Sequence[float]
    val_loss: float
    rate: float
    quartiles: tuple[float, float]
    peak_bytes: int
    skipped: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What all sides have in common.

    Attributes:
        model: The configuration's name.
        parameters: Of the model.
        steps: That each side took.
        device: Its name and kind.
    """

    model: str
    parameters: int
    steps: int
    device: str

    def text(self, language: str = "en") -> str:
        """What was trained, and where."""
        values = {**asdict(self), "parameters": f"{self.parameters:,}"}
        return gettext(
            "{model}, {parameters} parameters, {steps} steps on {device}", language
        ).format(**values)


def verdict(sides: Sequence[Side], language: str = "en") -> str:
    """What the fastest of the others does beside the first, in one sentence.

    The speed of a simulated format says nothing of hardware that has it, so that it is told
    only of native ones, where there is one.

    Args:
        sides: Two or more; the first is what the others are compared with.
        language: Of the sentence.
    """
    first, others = sides[0], sides[1:]
    native = [side for side in others if not side.simulated]
    other = max(native or others, key=lambda side: side.rate)
    less = 1 - other.peak_bytes / first.peak_bytes
    values = {
        "first": first.precision,
        "other": other.precision,
        "times": f"{other.rate / first.rate:.2f}",
        "share": f"{abs(less):.0%}",
        "loss": f"{other.val_loss / first.val_loss - 1:+.2%}",
    }
    if not native:
        text = gettext(
            "{other} is simulated on this processor, so that its speed says nothing of other "
            "devices; its validation loss differs from that of {first} by {loss}.",
            language,
        )
    elif less >= 0:
        text = gettext(
            "Beside {first}, {other} trains {times} times as many tokens per second in {share} "
            "less memory, and its validation loss differs by {loss}.",
            language,
        )
    else:
        text = gettext(
            "Beside {first}, {other} trains {times} times as many tokens per second in {share} "
            "more memory, and its validation loss differs by {loss}.",
            language,
        )
    return text.format(**values)


def draw(sides: Sequence[Side], trial: Trial, folder: Path, language: str = "en") -> list[Path]:
    """Write the figure as demo.png and demo.svg into a folder.

    Args:
        sides: One or more.
        trial: What they have in common.
        folder: It exists.
        language: Of titles; English where no installed font has the characters.

    Returns:
        The files; none without matplotlib.
    """
    figure = new_figure(_SIZE)
    if figure is None:
        return []
    with fonts_of(language) as spoken:
        _fill(figure, sides, trial, spoken)
        png, svg = folder / "demo.png", folder / "demo.svg"
        save_svg(figure, svg)
        save_png(figure, png)
    return [png, svg]


def _fill(figure: Any, sides: Sequence[Side], trial: Trial, language: str) -> None:
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    curves = figure.add_subplot(grid[:, 0])
    for i, side in enumerate(sides):
        label = f"{side.precision}: {side.val_loss:.4f}"
        how = {"linewidth": _WIDTHS[min(i, len(_WIDTHS) - 1)]}
        curves.plot(side.steps, side.losses, color=_colour(i), label=label, **how)
    styled(curves, gettext("Step", language))
    curves.set_title(gettext("Training loss, nats per token", language), color=INK, fontsize=11)
    told = gettext("validation loss at the end", language)
    curves.legend(title=told, frameon=False, fontsize=10, title_fontsize=10, labelcolor=INK)
    curves.get_legend().get_title().set_color(INK)
    speed, memory = (figure.add_subplot(grid[i, 1]) for i in range(2))
    _bars(speed, sides, [f"{side.rate:,.0f}" for side in sides], [side.rate for side in sides])
    speed.set_title(gettext("Tokens/s (median)", language), color=INK, fontsize=11)
    peaks = [side.peak_bytes / 1e6 for side in sides]
    _bars(memory, sides, [f"{peak:,.0f}" for peak in peaks], peaks)
    memory.set_title(gettext("Peak memory, MB", language), color=INK, fontsize=11)
    caption = trial.text(language)
    if any(side.simulated for side in sides):
        note = gettext(
            "* simulated: this processor has no instructions for such products", language
        )
        caption = f"{caption}\n{note}"
    figure.supxlabel(caption, color=INK, fontsize=8.5)


def _bars(axes: Any, sides: Sequence[Side], texts: Sequence[str], values: Sequence[float]) -> None:
    """Bars from above to below in the colours of the curves, each with its number in it."""
    names = [f"{side.precision}{'*' if side.simulated else ''}" for side in sides]
    bars = axes.barh(names, values, color=[_colour(i) for i in range(len(sides))], height=0.72)
    axes.bar_label(bars, texts, padding=3, fontsize=10, color=INK)
    axes.set_xlim(0, 1.22 * max(values))
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, labelsize=10, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
