"""The gradients of a GPT's activations by power of two, and how many of them fp16 turns into 0.

The loss is a mean over tokens, so more tokens in a batch make every one of these gradients smaller.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.diagnostics.statistics.values import Kind
from halfstep.diagnostics.statistics.watch import watch
from halfstep.formats import FP16
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, LETTERS, finish, note, power
from halfstep.lab.material import Batch, batches, gpt, loss_of, train
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.trainer.config.read import AtLeast1
from halfstep.trainer.models.gpt.gpt import GPT

LENGTH = 128
SCALES = range(25)
LEAST = round(math.log2(FP16.min_subnormal)) - 1
"""Below 2 to this power fp16 has 0 only: half of the smallest number, which is itself a tie and
goes to 0, too."""
BEYOND = math.ceil(math.log2(FP16.max))
FEW, MANY = COLOURS["bf16"], COLOURS["fp16"]


@dataclass(frozen=True)
class Options:
    """Sequences of the two batches, and steps of training before."""

    small: AtLeast1 = 16
    large: AtLeast1 = 96
    steps: AtLeast1 = 60


def measure(options: Options) -> Data:
    """Histograms of a trained model's gradients at both sizes, and what fp16 loses of them."""
    model = gpt(length=LENGTH)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    train("fp32", model, optimizer, batches(16, LENGTH, seed=0), options.steps, warmup=20)
    histograms = {}
    largest = []
    for sequences in (options.small, options.large):
        found = gradients(model, next(batches(sequences, LENGTH, seed=1)))
        histograms[str(sequences)] = found["activation_gradient"]
        largest.append(max(max(counts) for counts in found.values()))
    return {
        "histogram": {
            sequences: {str(e): counts[e] for e in sorted(counts)}
            for sequences, counts in histograms.items()
        },
        "tokens": {sequences: int(sequences) * LENGTH for sequences in histograms},
        "lost": {
            sequences: [share_below(counts, LEAST - scale) for scale in SCALES]
            for sequences, counts in histograms.items()
        },
        "subnormal": {
            sequences: share_below(counts, FP16.min_exponent) - share_below(counts, LEAST)
            for sequences, counts in histograms.items()
        },
        "overflow": {
            sequences: BEYOND - exponent
            for sequences, exponent in zip(histograms, largest, strict=True)
        },
    }


def gradients(model: GPT, batch: Batch) -> dict[Kind, Counter[int]]:
    """How many gradients of one batch have which exponent, in fp32: activations' and weights'."""
    model = copy.deepcopy(model)
    counted: dict[Kind, Counter[int]] = {"activation_gradient": Counter(), "gradient": Counter()}
    with (
        Precision("fp32", model, torch.optim.SGD(model.parameters(), lr=0.0)) as precision,
        watch(model, precision) as watched,
    ):
        precision.step(loss_of(model, batch))
    report = watched.report()
    assert report is not None, "its first step is watched"
    for kind, counts in counted.items():
        for tensor in report.of(kind):
            counts.update(tensor.exponents)
    return counted


def share_below(counts: Counter[int], exponent: float) -> float:
    """The share of numbers smaller than 2^exponent."""
    return sum(count for e, count in counts.items() if e < exponent) / counts.total()


def draw(figure: Any, data: Data, say: Say) -> None:
    """Above, both histograms over the limits of fp16; below, the lost share at every loss scale."""
    sizes, scales = figure.subplots(2, 1, height_ratios=(1.25, 1.0))
    highest = 0.0
    for (sequences, counts), colour in zip(data["histogram"].items(), (FEW, MANY), strict=True):
        total = sum(counts.values())
        shares = {int(e): 100 * count / total for e, count in counts.items()}
        edges = range(min(shares), max(shares) + 2)
        heights = [shares.get(e, 0.0) for e in edges[:-1]]
        sizes.stairs(heights, edges, color=colour, lw=2.4)
        highest = max(highest, *heights)
        _label(sizes, data, sequences, colour, say)
    sizes.set(xlim=(-46, 6), ylim=(0, 1.5 * highest))
    sizes.axvspan(-46, LEAST, color=MANY, alpha=0.13, lw=0)
    sizes.axvline(LEAST, color=MANY, lw=2)
    sizes.axvline(FP16.min_exponent, color="#8a8f98", lw=1.5, ls="--")
    ticks = (-40, LEAST, FP16.min_exponent, 0)
    sizes.set_xticks(ticks, map(power, ticks))
    place: dict[str, Any] = {"textcoords": "axes fraction"}
    at: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "va": "top"}
    zero: dict[str, Any] = {"ha": "right", "colour": MANY, "fontweight": "bold", **at}
    note(sizes, say("zero"), (LEAST - 0.7, 0.98), **zero)
    note(sizes, say("subnormal"), (LEAST + 0.6, 0.98), **at)
    finish(sizes, say("magnitude"), say("share"))
    for lost, colour in zip(data["lost"].values(), (FEW, MANY), strict=True):
        scales.plot(SCALES, [100 * share for share in lost], color=colour, lw=2.4)
    top = 100 * max(max(lost) for lost in data["lost"].values())
    ceiling = min(data["overflow"].values())
    scales.set(xlim=(0, 24), ylim=(-0.03 * top, 1.25 * top))
    scales.set_xticks(range(0, 25, 4), map(power, range(0, 25, 4)))
    if ceiling <= SCALES[-1]:
        scales.axvspan(ceiling, 24, color="#8a8f98", alpha=0.25, lw=0)
        first = min(data["overflow"], key=data["overflow"].__getitem__)
        inside = (ceiling + 24) / 2, 0.12 * top
        note(scales, say("overflow", sequences=first), (0.31, 0.19), inside, **place)
    for (sequences, lost), colour, spot in zip(
        data["lost"].items(), (FEW, MANY), ((0.3, 0.43), (0.22, 0.6)), strict=True
    ):
        text = say("sequences", sequences=sequences)
        note(scales, text, spot, (2, 100 * lost[2]), colour=colour, **place)
    scales.text(0.22, 0.94, say("rescued"), va="top", fontsize=LETTERS, transform=scales.transAxes)
    finish(scales, say("scale"), say("left"))


def _label(axes: Any, data: Data, sequences: str, colour: str, say: Say) -> None:
    """Write beside a histogram, left of the limit, the share that becomes 0."""
    lost = f"{data['lost'][sequences][0]:.1%}"
    text = say("lost", sequences=sequences, tokens=f"{data['tokens'][sequences]:,}", share=lost)
    large = int(sequences) == max(map(int, data["tokens"]))
    counts = data["histogram"][sequences]
    to = LEAST - 2, 100 * counts.get(str(LEAST - 2), 0) / sum(counts.values())
    how = {"textcoords": "axes fraction", "va": "center"}
    note(axes, text, (0.02, 0.72 if large else 0.47), to, colour=colour, **how)


def verdict(data: Data, say: Say) -> str:
    """How much becomes 0 at both batch sizes, and from which scale on next to nothing does."""
    small, large = sorted(data["tokens"], key=int)
    enough = next((s for s in SCALES if data["lost"][large][s] < 1e-3), None)
    values = {
        "small": f"{data['tokens'][small]:,}",
        "large": f"{data['tokens'][large]:,}",
        "at_small": f"{data['lost'][small][0]:.1%}",
        "at_large": f"{data['lost'][large][0]:.1%}",
    }
    ceiling = min(data["overflow"].values())
    values["ceiling"] = power(ceiling)
    if enough is None or enough >= ceiling:
        return say("verdict_never", **values)
    return say("verdict", enough=power(enough), **values)


EXPERIMENT = Experiment("underflow", Options, measure, draw, verdict, size=(6.4, 7.2))
