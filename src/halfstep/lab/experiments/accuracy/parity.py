"""The same training in fp32, bf16 and fp16, with several seeds: is there a difference at all?

Two models are trained: a GPT on text, and a BERT on posts with an emotion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torch import nn

from halfstep.lab import material, posts
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, LETTERS, band, finish
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.trainer.config.read import AtLeast1
from halfstep.trainer.data.records import READERS

POLICIES = {"fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
LAYERS, WIDTH, LENGTH, POINTS = 2, 64, 64, 6
SEQUENCES, POSTS = 8, 32
"""In a batch of the GPT, and of the BERT."""
RATES = {"gpt": 3e-3, "bert": 1e-3}


@dataclass(frozen=True)
class Options:
    """Steps of each run, how many seeds, and a file to train on instead of what comes with it."""

    steps: AtLeast1 = 100
    seeds: AtLeast1 = 3
    data: str = ""


@dataclass(frozen=True)
class _Trained:
    """A model of one seed, its batches, and how it is judged: the loss first."""

    model: nn.Module
    batches: Iterator[material.Batch]
    judge: Callable[[Precision], tuple[float, ...]]


def measure(options: Options) -> Data:
    """Losses on what was held out, by model, policy and seed; same weights and batches in each.

    Raises:
        DataError: If the file cannot be used.
    """
    for read in (material.text, posts.posts):
        read.cache_clear()  # a reader of a notebook may have changed the file
    every = max(1, options.steps // POINTS)
    at = [step for step in range(1, options.steps + 1) if step % every == 0]
    at = at if at[-1] == options.steps else [*at, options.steps]
    models = {"gpt": _gpt, "bert": _bert}
    found: Data = {"steps": at, "policies": POLICIES, "losses": {}, "accuracy": {}}
    for kind, make in models.items():
        runs = {
            name: [
                _looks(policy, kind, make(seed, options.data), at) for seed in range(options.seeds)
            ]
            for name, policy in POLICIES.items()
        }
        found["losses"][kind] = {
            name: [[look[0] for look in run] for run in each] for name, each in runs.items()
        }
        if kind == "bert":
            found["accuracy"] = {name: [run[-1][1] for run in each] for name, each in runs.items()}
    return found


def _is_labelled(data: str) -> bool:
    return Path(data).suffix.lower() in READERS


def _gpt(seed: int, data: str) -> _Trained:
    path = "" if _is_labelled(data) else data
    model = material.gpt(LAYERS, WIDTH, LENGTH, seed=seed)

    def judge(precision: Precision) -> tuple[float, ...]:
        return (material.validation(precision, model, LENGTH, path=path, sequences=32),)

    return _Trained(model, material.batches(SEQUENCES, LENGTH, seed, path=path), judge)


def _bert(seed: int, data: str) -> _Trained:
    source = posts.posts(data if _is_labelled(data) else "")
    model = posts.Bert(source, layers=LAYERS, width=WIDTH, seed=seed)

    def judge(precision: Precision) -> tuple[float, ...]:
        return posts.held_out(precision, model, source)

    return _Trained(model, posts.batches(source, POSTS, seed), judge)


def _looks(policy: str, kind: str, trained: _Trained, at: list[int]) -> list[tuple[float, ...]]:
    """How the model is judged after each of some steps of training."""
    optimizer = AdamW(trained.model.parameters(), lr=RATES[kind])
    looks: list[tuple[float, ...]] = []

    def look(step: int, precision: Precision) -> None:
        if step in at:
            looks.append(trained.judge(precision))

    material.train(policy, trained.model, optimizer, trained.batches, at[-1], warmup=10, after=look)
    return looks


def draw(figure: Any, data: Data, say: Say) -> None:
    """For each model the seeds' bands, and each run's difference from fp32 beside their spread."""
    panels = figure.subplots(4, height_ratios=(1.2, 0.8, 1.2, 0.8))
    for at, kind in enumerate(data["losses"]):
        _draw_curves(panels[2 * at], kind, data, say)
        _draw_ends(panels[2 * at + 1], _compared(data["losses"][kind]), data["policies"], say)


def _draw_curves(axes: Any, kind: str, data: Data, say: Say) -> None:
    losses = data["losses"][kind]
    for name, style in zip(losses, ("-", "--", ":"), strict=True):
        text = data["policies"][name]
        if kind == "bert":
            text = say("accurate", policy=text, share=fmean(data["accuracy"][name]))
        how = {"color": COLOURS[name], "lw": 2.4, "ls": style, "label": text}
        band(axes, data["steps"], losses[name], pale=0.15, **how)
    finish(axes, say("steps_axis"), say("loss", seeds=len(losses["fp32"])), say(kind))
    how = {"frameon": False, "borderaxespad": 0, "labelspacing": 0.3, "handlelength": 1.6}
    axes.legend(loc="upper right", fontsize=LETTERS - 0.5, **how)


def _draw_ends(axes: Any, found: dict[str, Any], policies: dict[str, str], say: Say) -> None:
    differences, noise = found["differences"], found["noise"]
    axes.axvspan(-noise, noise, color="#999999", alpha=0.3, lw=0)
    axes.axvline(0, color=COLOURS["fp32"], lw=1.6)
    for row, name in enumerate(differences):
        at = [row] * len(differences[name])
        axes.plot(differences[name], at, "o", color=COLOURS[name], ms=8, alpha=0.8)
    axes.set_yticks(range(len(differences)), [policies[name] for name in differences])
    axes.set_ylim(len(differences) - 0.4, -0.6)
    reach = 1.3 * max([noise, *(abs(d) for ds in differences.values() for d in ds)])
    axes.set_xlim(-(reach or 1), reach or 1)
    axes.locator_params(axis="x", nbins=5)
    finish(axes, say("difference"), say("noise", noise=noise), say("ends"))


def _compared(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Last losses' differences from fp32, seed by seed, and how far seeds are apart in fp32."""
    ends = {name: [run[-1] for run in runs] for name, runs in losses.items()}
    fp32 = ends.pop("fp32")
    return {
        "noise": stdev(fp32) if len(fp32) > 1 else 0.0,
        "differences": {
            name: [loss - base for loss, base in zip(losses, fp32, strict=True)]
            for name, losses in ends.items()
        },
    }


def verdict(data: Data, say: Say) -> str:
    """Whether the mean distance of a format from fp32 is more than what another seed changes."""
    values: dict[str, Any] = {"steps": data["steps"][-1]}
    apart = []
    for kind, losses in data["losses"].items():
        found = _compared(losses)
        far = {name: fmean(map(abs, each)) for name, each in found["differences"].items()}
        values |= {f"{kind}_{name}": f"{each:.4f}" for name, each in far.items()}
        values[f"{kind}_noise"] = f"{found['noise']:.4f}"
        if max(far.values()) >= found["noise"]:
            apart.append(kind.upper())
    if len(data["losses"]["gpt"]["fp32"]) < 2:
        return say("verdict_one", **values)
    if apart:
        return say("verdict_apart", which=say("and").join(apart), **values)
    return say("verdict", **values)


EXPERIMENT = Experiment("parity", Options, measure, draw, verdict, size=(6.4, 10.6))
