"""1 + 0.001 in each format: an update below half a gap is gone, unless something keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.formats import FORMATS
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish
from halfstep.optim import SGD
from halfstep.precision.masters.rounding import Update
from halfstep.trainer.config.read import AtLeast1, Positive

PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KEPT: tuple[Update, ...] = ("split", "kahan")


@dataclass(frozen=True)
class Options:
    """What can be changed."""

    update: Positive = 1e-3
    steps: AtLeast1 = 100
    seeds: AtLeast1 = 64


def measure(options: Options) -> Data:
    """The weight after each update, as the next update finds it."""
    curves = {name: _added(dtype, options) for name, dtype in PLAIN.items()}
    curves |= {f"bf16-{update}": _trained(update, options) for update in KEPT}
    seeds = [_trained("stochastic", options, seed) for seed in range(options.seeds)]
    return {
        "truth": 1.0 + options.steps * options.update,
        "update": options.update,
        "curves": curves,
        "stochastic": seeds,
        "gaps": {name: FORMATS[name].eps for name in ("fp32", "fp16", "bf16")},
    }


def _added(dtype: torch.dtype, options: Options) -> list[float]:
    """The update added to the weight itself, each sum rounded to its format."""
    weight, update = torch.ones(1, dtype=dtype), torch.tensor([options.update], dtype=dtype)
    kept = [1.0]
    for _ in range(options.steps):
        weight = weight + update
        kept.append(weight.item())
    return kept


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
    """Curves of the weight; the band holds every seed of stochastic rounding."""
    axes = figure.subplots()
    steps = range(len(data["curves"]["fp32"]))
    seeds = torch.tensor(data["stochastic"], dtype=torch.float64)
    axes.fill_between(
        steps, seeds.min(0).values, seeds.max(0).values, color=COLOURS["bf16-sr"], alpha=0.2, lw=0
    )
    axes.plot(steps, seeds.mean(0), color=COLOURS["bf16-sr"], label=say("mean", seeds=len(seeds)))
    for name, curve in data["curves"].items():
        style = "--" if name in ("bf16-split", "bf16-kahan") else "-"
        axes.plot(steps, curve, style, color=COLOURS[name], label=name, lw=2.2)
    axes.set_ylabel(say("weight"))
    finish(axes, say("updates", update=data["update"]))


def verdict(data: Data, say: Say) -> str:
    """Which formats lost updates, and how many of each."""
    start, truth = 1.0, data["truth"]
    kept = {
        name: (data["curves"][name][-1] - start) / (truth - start)
        for name in ("fp16", "bf16", "bf16-split")
    }
    return say(
        "verdict",
        update=data["update"],
        truth=truth,
        **{k.replace("-", "_"): v for k, v in kept.items()},
    )


EXPERIMENT = Experiment("small-updates", Options, measure, draw, verdict)
