"""The bits of each format, and what they buy: exponent bits range, mantissa bits fine gaps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.formats import FORMATS, FloatFormat
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish, note, power
from halfstep.report.figures import GRID, INK
from halfstep.trainer.config.read import Positive

SIGN, EXPONENT, MANTISSA = "#8a8f98", "#6a3d9a", "#e0a000"
"""None of them is the colour of a format."""
SPAN = 1.0625
"""The number line ends at this many times its beginning."""
PALE = {"0": 0.18, "1": 1.0}
MOST_TICKS = 400
RANGE_TICKS = (-149, -75, -24, 16, 64, 128)


@dataclass(frozen=True)
class Options:
    """The number that is rounded, and where the number line begins."""

    value: Positive = 0.1
    at: Positive = 1.0


def measure(options: Options) -> Data:
    """Of each format its bits, range and gaps, the number next to ``value`` and its bits."""
    formats = {name: _describe(form, options) for name, form in FORMATS.items()}
    return {"value": options.value, "at": options.at, "span": SPAN, "formats": formats}


def _describe(form: FloatFormat, options: Options) -> Data:
    (nearest,) = form.round_to(torch.tensor([options.value], dtype=torch.float64)).tolist()
    sign, exponent, mantissa = form.bits_of(nearest)
    bits = f"{sign:b}{exponent:0{form.exponent_bits}b}{mantissa:0{form.mantissa_bits}b}"
    return {
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "bits": bits,
        "nearest": nearest if math.isfinite(nearest) else str(nearest),
        "least": form.min_subnormal,
        "normal": form.min_normal,
        "largest": form.max,
        "gap": form.ulp(options.at) if options.at <= form.max else None,
        "numbers": _numbers(form, options.at, options.at * SPAN),
    }


def _numbers(form: FloatFormat, low: float, high: float) -> list[float]:
    """The numbers of a format from ``low`` to ``high``; the first ones, where they are too many."""
    (nearest,) = form.round_to(torch.tensor([low], dtype=torch.float64)).tolist()
    number = low if nearest == low else form.neighbours(low)[1]
    found: list[float] = []
    while number <= min(high, form.max) and len(found) <= MOST_TICKS:
        found.append(number)
        number = form.neighbours(number)[1]
    return found


def draw(figure: Any, data: Data, say: Say) -> None:
    """Bits as boxes, ranges as bars, numbers as marks on a line; one row for each format."""
    bits, ranges, line = figure.subplots(3, 1, height_ratios=(1.0, 1.0, 1.0))
    for row, (name, form) in enumerate(data["formats"].items()):
        _draw_bits(bits, row, form)
        _draw_range(ranges, row, form, COLOURS[name])
        _draw_numbers(line, row, form, data, COLOURS[name], say)
    for axes in (bits, ranges, line):
        axes.set_axisbelow(True)
        axes.set_yticks(range(len(data["formats"])), list(data["formats"]))
        axes.set_ylim(len(data["formats"]) - 0.4, -0.7)
    bits.set(xlim=(-0.3, 43), xticks=[])
    finish(bits, "", title=say("bits", value=f"{data['value']:g}"))
    bits.grid(visible=False)
    bits.spines["bottom"].set_visible(False)
    ranges.set_xlim(-192, 205)
    ranges.set_xticks(RANGE_TICKS, map(power, RANGE_TICKS))
    finish(ranges, "", title=say("range"))
    line.set_xlim(data["at"] * 0.995, data["at"] * (1 + (data["span"] - 1) * 1.35))
    ticks = [data["at"] * (1 + (data["span"] - 1) * part / 2) for part in range(3)]
    line.set_xticks(ticks, [f"{tick:.6g}" for tick in ticks])
    finish(line, "", title=say("line", at=f"{data['at']:g}", end=f"{data['at'] * data['span']:g}"))
    line.grid(visible=False)
    ranges.yaxis.grid(visible=False)


def _draw_bits(axes: Any, row: int, form: Data) -> None:
    """One box a bit: full where the bit is 1, pale where it is 0."""
    starts = 1, 1 + form["exponent_bits"]
    for place, bit in enumerate(form["bits"]):
        colour = SIGN if place < starts[0] else EXPONENT if place < starts[1] else MANTISSA
        axes.barh(row, 0.84, left=place + 0.08, height=0.74, color=colour, alpha=PALE[bit], lw=0)
        axes.barh(row, 0.84, left=place + 0.08, height=0.74, fc="none", ec=colour, lw=0.9)
    note(axes, f"= {_shown(form['nearest'], 10)}", (len(form["bits"]) + 0.5, row), va="center")


def _draw_range(axes: Any, row: int, form: Data, colour: str) -> None:
    least, normal, largest = (math.log2(form[key]) for key in ("least", "normal", "largest"))
    axes.barh(row, largest - normal, left=normal, color=colour, height=0.6)
    axes.barh(row, normal - least, left=least, color=colour, height=0.6, alpha=0.35)
    smallest: dict[str, Any] = {"va": "center", "ha": "right", "colour": INK}
    note(axes, power(least), (least - 4, row), **smallest)
    note(axes, _shown(form["largest"]), (largest + 4, row), va="center", colour=INK)


def _draw_numbers(axes: Any, row: int, form: Data, data: Data, colour: str, say: Say) -> None:
    at, span = data["at"], data["span"]
    end = at * (1 + (span - 1) * 1.02)
    axes.hlines(row, at, at * span, color=GRID, lw=1.5, zorder=1)
    if form["gap"] is None:
        note(axes, say("beyond", largest=f"{form['largest']:g}"), (at, row), va="center")
        return
    marks = form["numbers"]
    if len(marks) <= MOST_TICKS:
        axes.vlines(marks, row - 0.32, row + 0.32, color=colour, lw=1.6, zorder=2)
    else:
        axes.barh(row, at * (span - 1), left=at, height=0.64, color=colour)
    note(axes, say("gap", gap=power(math.log2(form["gap"]))), (end, row), va="center")


def _shown(number: float | str, digits: int = 0) -> str:
    if isinstance(number, str):  # inf or nan
        return number
    return f"{number:.{digits or (3 if number > 1e6 else 6)}g}"


def verdict(data: Data, say: Say) -> str:
    """What the two formats of 16 bits hold, and what they make of the value."""
    values: dict[str, Any] = {}
    for name in ("bf16", "fp16"):
        form = data["formats"][name]
        values[f"{name}_numbers"] = 2 ** form["mantissa_bits"]
        values[f"{name}_largest"] = _shown(form["largest"])
        values[f"{name}_least"] = power(math.log2(form["least"]))
        values[f"{name}_nearest"] = _shown(form["nearest"], 8)
    return say("verdict", value=f"{data['value']:g}", **values)


EXPERIMENT = Experiment("formats", Options, measure, draw, verdict, size=(6.4, 8.6))
