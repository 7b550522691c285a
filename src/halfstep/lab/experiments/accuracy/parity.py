"""The same training in fp32, bf16 and fp16, with several seeds: is there a difference at all?"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from halfstep.lab import material
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, band, finish
from halfstep.optim import AdamW
from halfstep.trainer.config.read import AtLeast1, Positive

POLICIES = {"fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
LAYERS, WIDTH, LENGTH, SEQUENCES, POINTS = 2, 64, 64, 8, 10


@dataclass(frozen=True)
class Options:
    """Steps and learning rate of each run, and how many seeds."""

    steps: AtLeast1 = 150
    seeds: AtLeast1 = 3
    learning_rate: Positive = 3e-3


def measure(options: Options) -> Data:
    """Validation losses of a GPT on text, by policy and seed; same weights and batches in each."""
    every = max(1, options.steps // POINTS)
    at = [step for step in range(1, options.steps + 1) if step % every == 0]
    at = at if at[-1] == options.steps else [*at, options.steps]
    losses = {
        name: [_losses(policy, seed, options, at) for seed in range(options.seeds)]
        for name, policy in POLICIES.items()
    }
    return {"steps": at, "losses": losses, "policies": POLICIES}


def _losses(policy: str, seed: int, options: Options, at: list[int]) -> list[float]:
    model = material.gpt(LAYERS, WIDTH, LENGTH, seed=seed)
    optimizer = AdamW(model.parameters(), lr=options.learning_rate)
    data = material.batches(SEQUENCES, LENGTH, seed)
    return material.validated(policy, model, optimizer, data, at, LENGTH, warmup=10)


def draw(figure: Any, data: Data, say: Say) -> None:
    """Bands of the seeds above; below, each run's difference from fp32 beside the seeds' spread."""
    curves, ends = figure.subplots(2, height_ratios=(1.25, 1))
    for (name, runs), style in zip(data["losses"].items(), ("-", "--", ":"), strict=True):
        how = {"color": COLOURS[name], "lw": 2.4, "ls": style, "label": data["policies"][name]}
        band(curves, data["steps"], runs, pale=0.15, **how)
    title = say("curves", seeds=len(data["losses"]["fp32"]))
    finish(curves, say("steps_axis"), say("loss"), title)
    found = _compared(data)
    ends.axvspan(-found["noise"], found["noise"], color="#999999", alpha=0.3, lw=0)
    ends.axvline(0, color=COLOURS["fp32"], lw=1.6)
    for row, name in enumerate(found["differences"]):
        differences = found["differences"][name]
        ends.plot(differences, [row] * len(differences), "o", color=COLOURS[name], ms=8, alpha=0.8)
    names = [data["policies"][name] for name in found["differences"]]
    ends.set_yticks(range(len(names)), names)
    ends.set_ylim(-0.6, len(names) + 0.1)
    reach = 1.3 * max(
        [found["noise"], *(abs(d) for ds in found["differences"].values() for d in ds)]
    )
    ends.set_xlim(-(reach or 1), reach or 1)
    ends.text(0, len(names) - 0.4, say("noise", noise=found["noise"]), ha="center", va="center")
    finish(ends, say("difference"), title=say("ends"))


def _compared(data: Data) -> dict[str, Any]:
    """Last losses' differences from fp32, seed by seed, and how far seeds are apart in fp32."""
    ends = {name: [run[-1] for run in runs] for name, runs in data["losses"].items()}
    fp32 = ends.pop("fp32")
    return {
        "fp32": fmean(fp32),
        "noise": stdev(fp32) if len(fp32) > 1 else 0.0,
        "differences": {
            name: [loss - base for loss, base in zip(losses, fp32, strict=True)]
            for name, losses in ends.items()
        },
    }


def verdict(data: Data, say: Say) -> str:
    """Whether the largest difference of a format is more than what another seed changes."""
    found = _compared(data)
    worst = {name: max(map(abs, each)) for name, each in found["differences"].items()}
    values = {**worst, "noise": found["noise"], "steps": data["steps"][-1], "fp32": found["fp32"]}
    if len(data["losses"]["fp32"]) < 2:
        return say("verdict_one", **values)
    return say("verdict" if max(worst.values()) < found["noise"] else "verdict_apart", **values)


EXPERIMENT = Experiment("parity", Options, measure, draw, verdict, size=(6.2, 6.6))
