"""No loss scale, a static and a dynamic one: at a small batch nothing differs, at a large one all.

The model is the same plain GPT both times. The large batch is the small one whose loss is divided
as if it were one of many micro-batches, and whose finished gradients are multiplied by as many:
forward and backward compute what they would compute within a batch of so many tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.experiments.numbers.underflow import LEAST, gradients, share_below
from halfstep.lab.figure import COLOURS, LETTERS, band, finish, note, power
from halfstep.lab.material import batches, gpt, loss_of
from halfstep.optim import AdamW
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.loss_scale import LossScaleConfig
from halfstep.precision.step import Precision
from halfstep.report.figures import INK
from halfstep.trainer.config.read import AtLeast1
from halfstep.trainer.models.gpt.gpt import GPT

SEQUENCES, LENGTH, STEPS, LEARNING_RATE = 16, 64, 60, 3e-3
LAST = 10
"""The loss at the end is the mean of so many steps."""
LOOKS = {"none": COLOURS["fp16"], "static": "#009e73", "dynamic": COLOURS["bf16"]}
WIDTHS = {"none": 2.4, "static": 4.5, "dynamic": 2.0}
"""A wide line is still seen where a narrow one lies on it."""
STATIC = 65536


@dataclass(frozen=True)
class Options:
    """Micro-batches of the large batch, good steps until the scale doubles, and seeds."""

    micro_batches: AtLeast1 = 512
    growth: AtLeast1 = 5
    seeds: AtLeast1 = 3


def measure(options: Options) -> Data:
    """The losses of every run, the scale of the dynamic ones, and how much fp16 loses of each."""
    policies = {
        "none": "compute=fp16,scale=static,init_scale=1",
        "static": f"compute=fp16,scale=static,init_scale={STATIC}",
        "dynamic": f"compute=fp16,scale=dynamic,growth_interval={options.growth}",
    }
    model = gpt(2, 64, LENGTH)
    _train("fp32", 0, 1, model)
    counts = gradients(model, next(batches(SEQUENCES, LENGTH, seed=1)))["activation_gradient"]

    def runs(policy: str, share: int) -> list[list[StepResult]]:
        return [_train(policy, s, share, gpt(2, 64, LENGTH, s)) for s in range(options.seeds)]

    exact = [[result.loss for result in run] for run in runs("fp32", 1)]
    data: Data = {"fp32": exact, "growth": options.growth, "batches": {}}
    for share in dict.fromkeys((1, options.micro_batches)):
        made = {name: runs(policy, share) for name, policy in policies.items()}
        trace = made["dynamic"][0]
        data["batches"][str(SEQUENCES * LENGTH * share)] = {
            "zeros": share_below(counts, LEAST + math.log2(share)),
            "losses": {
                name: [[share * result.loss for result in run] for run in each]
                for name, each in made.items()
            },
            "scales": [result.loss_scale for result in trace],
            "skipped": [step for step, result in enumerate(trace, 1) if not result.applied],
        }
    return data


def _train(policy: str, seed: int, share: int, model: GPT) -> list[StepResult]:
    """Train on micro-batches that stand for ``share`` of them each."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    data, results = batches(SEQUENCES, LENGTH, seed), []
    with Precision(policy, model, optimizer, on_nonfinite="skip:1000") as precision:
        for _ in range(STEPS):
            with precision.autocast():
                loss = loss_of(model, next(data))
            precision.backward(loss / share)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= share
            results.append(precision.step(max_norm=1.0))
    return results


def draw(figure: Any, data: Data, say: Say) -> None:
    """A panel of losses for each batch size, and the dynamic scale of both."""
    count = len(data["batches"])
    *panels, trace = figure.subplots(count + 1, 1, height_ratios=[1.15] * count + [1.0])
    last = len(data["fp32"][0])
    everything = [loss for run in data["fp32"] for loss in _smooth(run)]
    bottom = min(everything)
    for axes, (tokens, batch) in zip(panels, data["batches"].items(), strict=True):
        for name, runs in batch["losses"].items():
            shown = say(name, end=end(runs), scale=power(math.log2(STATIC)))
            _draw_runs(axes, runs, color=LOOKS[name], lw=WIDTHS[name], label=shown)
        shown = say("exact", end=end(data["fp32"]))
        _draw_runs(axes, data["fp32"], color=COLOURS["fp32"], lw=1.4, ls=(0, (4, 4)), label=shown)
        axes.set(xlim=(1, last * 1.01), ylim=(bottom - 0.15, max(everything) + 0.1))
        title = say("batch", tokens=f"{int(tokens):,}", zeros=f"{batch['zeros']:.0%}")
        finish(axes, "", say("loss", seeds=len(data["fp32"])), title)
        how = {"title": say("ends", last=LAST), "alignment": "left", "title_fontsize": LETTERS - 1}
        axes.legend(loc="upper right", fontsize=LETTERS - 1, frameon=False, labelspacing=0.3, **how)
    _draw_scales(trace, data, say)


def _draw_scales(trace: Any, data: Data, say: Say) -> None:
    """The dynamic scale at each batch size, in the colour of its losses."""
    last = len(data["fp32"][0])
    for (tokens, batch), style in zip(data["batches"].items(), ((0, (2, 1)), "-"), strict=False):
        scales = batch["scales"]
        how = {"where": "mid", "color": LOOKS["dynamic"], "lw": 2.2, "ls": style}
        trace.step(range(1, last + 1), scales, **how)
        at = [scales[step - 1] for step in batch["skipped"]]
        trace.plot(batch["skipped"], at, "x", color=INK, ms=9, mew=2.4)
        said = "tokens_most" if max(scales) >= LossScaleConfig().max_scale else "tokens"
        text = say(said, tokens=f"{int(tokens):,}", most=power(math.log2(max(scales))))
        above = said == "tokens_most"
        spot = (last, scales[-1] * (1.6 if above else 1 / 1.6))
        va = "bottom" if above else "top"
        note(trace, text, spot, colour=LOOKS["dynamic"], ha="right", va=va)
    trace.set_yscale("log", base=2)
    shown = [scale for batch in data["batches"].values() for scale in batch["scales"]]
    low, high = math.log2(min(shown)), math.log2(max(shown))
    trace.set_ylim(2 ** (low - 2), 2 ** (high + 3))
    trace.set_xlim(1, last * 1.01)
    ticks = range(int(low), int(high) + 1, 2)
    trace.set_yticks([2.0**e for e in ticks], map(power, ticks))
    trace.minorticks_off()
    finish(trace, say("step"), say("scale", growth=data["growth"]))


def _draw_runs(axes: Any, runs: list[list[float]], **how: Any) -> None:
    band(axes, range(1, len(runs[0]) + 1), [_smooth(run) for run in runs], pale=0.18, **how)


def _smooth(losses: list[float], over: int = 5) -> list[float]:
    """The mean of each loss and those before it, at most ``over``."""
    parts = [losses[max(0, i + 1 - over) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def end(runs: list[list[float]]) -> str:
    """The mean loss over the last steps and all seeds, with its half range over seeds."""
    means = [sum(run[-LAST:]) / LAST for run in runs]
    return f"{sum(means) / len(means):.2f} ± {(max(means) - min(means)) / 2:.2f}"


def verdict(data: Data, say: Say) -> str:
    """What the lack of a scale cost at each batch size, and what the dynamic scale left of it."""

    def beyond(runs: list[list[float]]) -> float:
        """The mean over seeds of what a run ended above fp32."""
        pairs = zip(runs, data["fp32"], strict=True)
        found = [sum(a[-LAST:]) / LAST - sum(b[-LAST:]) / LAST for a, b in pairs]
        return fmean(found)

    parts = []
    for tokens, batch in data["batches"].items():
        values = {name: f"{beyond(runs):+.3f}" for name, runs in batch["losses"].items()}
        zeros = f"{batch['zeros']:.0%}"
        parts.append(say("at", tokens=f"{int(tokens):,}", zeros=zeros, **values))
    return say("verdict", parts=say("join").join(parts))


EXPERIMENT = Experiment("loss-scale", Options, measure, draw, verdict, size=(6.4, 9.0))
