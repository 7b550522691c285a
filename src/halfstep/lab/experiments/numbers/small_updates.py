"""1 + 0.001 in each format: an update below half a gap is gone, unless something keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.formats import FORMATS
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish, note
from halfstep.lab.material import running_sum
from halfstep.optim import SGD
from halfstep.precision.masters.rounding import Update
from halfstep.trainer.config.read import AtLeast1, Positive

PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KEPT: tuple[Update, ...] = ("split", "kahan")


@dataclass(frozen=True)
class Options:
    """The update, how many of them, and seeds of stochastic rounding."""

    update: Positive = 1e-3
    steps: AtLeast1 = 100
    seeds: AtLeast1 = 64


def measure(options: Options) -> Data:
    """The weight after each update, as the next update finds it."""
    curves = {
        name: running_sum(1.0, options.update, options.steps, dtype)
        for name, dtype in PLAIN.items()
    }
    curves |= {f"bf16-{update}": _trained(update, options) for update in KEPT}
    seeds = [_trained("stochastic", options, seed) for seed in range(options.seeds)]
    return {
        "truth": 1.0 + options.steps * options.update,
        "update": options.update,
        "curves": curves,
        "stochastic": seeds,
        "gaps": {name: FORMATS[name].eps for name in PLAIN},
    }


def _trained(update: Update, options: Options, seed: int = 0) -> list[float]:
    """The update made by an optimizer that keeps more than the bf16 weight."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = SGD([weight], lr=options.update, update=update, seed=seed)
    kept = [1.0]
    for _ in range(options.steps):
        optimizer.step(gradients={weight: torch.tensor([-1.0])})
        kept.append(float(optimizer.read_master(weight)))
    return kept


def draw(figure: Any, data: Data, say: Say) -> None:
    """Curves of the weight over the numbers of bf16; the band is one deviation of bf16-sr."""
    axes, curves, truth = figure.subplots(), data["curves"], data["truth"]
    last = len(curves["fp32"]) - 1
    seeds = torch.tensor(data["stochastic"], dtype=torch.float64)
    mean, spread = seeds.mean(0), seeds.std(0, correction=0)
    low, high = mean - spread, mean + spread
    top = max(float(high.max()), truth, *(max(curve) for curve in curves.values()))
    gap, room = data["gaps"]["bf16"], 0.03 * (top - 1)
    for number in range(min(round((top - 1) / gap) + 2, 60)):
        axes.axhline(1 + number * gap, color="#9a9c9f", lw=0.8, zorder=1)
    axes.fill_between(range(last + 1), low, high, color=COLOURS["bf16-sr"], alpha=0.22, lw=0)
    axes.plot(mean, color=COLOURS["bf16-sr"], lw=1.5)
    for name in ("fp32", "bf16-split", "bf16-kahan", "fp16", "bf16"):
        style = {"bf16-split": (0, (4, 4)), "bf16-kahan": (4, (1, 7))}.get(name, "-")
        axes.plot(curves[name], color=COLOURS[name], lw=2.6, ls=style)
    axes.set(xlim=(0, last * 1.02), ylim=(1 - 8 * room, top + 6 * room))
    finish(axes, say("updates", update=f"{data['update']:g}"), say("weight", gap=f"{gap:.2g}"))
    axes.grid(visible=False)  # the only lines are numbers of bf16
    axes.ticklabel_format(useOffset=False)

    def beside(text: str, at: tuple[float, float], to: tuple[int, float], name: str) -> None:
        how = {"xycoords": "data", "textcoords": "axes fraction", "va": "center"}
        box = {"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
        note(axes, text, at, to, colour=COLOURS[name], bbox=box, **how)

    beside(say("kept"), (0.03, 0.75), (last // 2, curves["fp32"][last // 2]), "fp32")
    here = round(0.75 * last)
    beside(say("mean", seeds=len(seeds)), (0.03, 0.93), (here, float(high[here])), "bf16-sr")
    for name, at, here in (("fp16", (0.57, 0.3), last), ("bf16", (0.3, 0.075), last // 2)):
        becomes = curves[name][1] - 1
        values = {"gap": f"{data['gaps'][name]:.3g}", "becomes": f"{becomes:.3g}"}
        text = say("rounded", form=name, update=f"{data['update']:g}", **values)
        beside(text, at, (here, curves[name][here]), name)


def verdict(data: Data, say: Say) -> str:
    """How much of the way each format covered."""
    way = data["truth"] - 1
    kept = {name: (curve[-1] - 1) / way for name, curve in data["curves"].items()}
    kept["bf16-sr"] = sum(curve[-1] - 1 for curve in data["stochastic"]) / way
    kept["bf16-sr"] /= len(data["stochastic"])
    values = {name.replace("-", "_"): share for name, share in kept.items()}
    return say("verdict", update=data["update"], truth=data["truth"], **values)


EXPERIMENT = Experiment("small-updates", Options, measure, draw, verdict, size=(6.4, 5.4))
