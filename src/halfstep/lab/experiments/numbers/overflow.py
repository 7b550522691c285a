"""Activations that outgrow fp16: the loss is NaN at any loss scale, and bf16 trains on.

A learning rate that is far too large makes the outputs of a GPT's layers grow from step to step. A
loss scale multiplies gradients; what overflows here is the forward pass.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halfstep.diagnostics.nonfinite.again import first_cause
from halfstep.formats import FP16
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish, note
from halfstep.lab.material import batches, gpt, loss_of
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.trainer.config.read import AtLeast1, Positive
from halfstep.trainer.models.gpt.gpt import GPT

SEQUENCES, LENGTH = 16, 64
POLICIES = {
    "bf16-mixed": "bf16-mixed",
    "fp16, loss scale 65536": "compute=fp16,scale=static,init_scale=65536",
    "fp16, loss scale 1": "compute=fp16,scale=static,init_scale=1",
}


@dataclass(frozen=True)
class Options:
    """What can be changed."""

    learning_rate: Positive = 0.2
    steps: AtLeast1 = 60
    seed: AtLeast1 = 1


def measure(options: Options) -> Data:
    """Of each policy the loss and the largest layer output, up to the first NaN, and its cause."""
    return {
        "limit": FP16.max,
        "learning_rate": options.learning_rate,
        "steps": options.steps,
        "runs": {name: _run(policy, options) for name, policy in POLICIES.items()},
    }


def _run(policy: str, options: Options) -> Data:
    model = gpt(2, 128, LENGTH, options.seed)
    optimizer = AdamW(model.parameters(), lr=options.learning_rate)
    data, largest = batches(SEQUENCES, LENGTH, options.seed), Largest(model)
    found: Data = {"loss": [], "largest": [], "cause": ""}
    with Precision(policy, model, optimizer, on_nonfinite="skip:1") as precision:
        for _ in range(options.steps):
            batch = next(data)
            with precision.autocast():
                loss = loss_of(model, batch)
            if not math.isfinite(value := loss.item()):
                cause = first_cause(precision, lambda batch: loss_of(model, batch), batch)
                return found | {"cause": "" if cause is None else cause.summary}
            found["largest"].append(largest.taken())
            found["loss"].append(value)
            with warnings.catch_warnings(action="ignore"):
                precision.step(loss, max_norm=1.0)
    return found


class Largest:
    """The largest magnitude that leaves a linear layer, since it was last asked for."""

    def __init__(self, model: GPT) -> None:
        """Look at all linear layers of the model."""
        self._seen: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._look)

    def _look(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._seen.append(output.detach().abs().max().float())

    def taken(self) -> float:
        """The largest so far; what comes next counts anew."""
        most = max(map(float, self._seen))
        self._seen.clear()
        return most


def draw(figure: Any, data: Data, say: Say) -> None:
    """Above, the largest layer output against the limit of fp16; below, the losses."""
    size, loss = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, 1.0))
    looks = {
        name: {"color": COLOURS[name[:4]], "lw": 2.6, "ls": "-" if "1" not in name[-2:] else "--"}
        for name in data["runs"]
    }
    limit, steps = data["limit"], data["steps"]
    for name, run in data["runs"].items():
        size.plot(range(1, len(run["largest"]) + 1), run["largest"], **looks[name])
        loss.plot(range(1, len(run["loss"]) + 1), run["loss"], **looks[name])
        if run["cause"] and run["loss"]:
            for axes, key in ((size, "largest"), (loss, "loss")):
                how = {"color": COLOURS["fp16"], "ms": 11, "mew": 3, "zorder": 8}
                axes.plot([len(run[key])], [run[key][-1]], "X", **how)
    size.set_yscale("log")
    most = max(limit, *(max(run["largest"], default=0.0) for run in data["runs"].values()))
    size.set(xlim=(0, steps * 1.02), ylim=(1, most * 12))
    size.axhspan(limit, most * 12, color=COLOURS["fp16"], alpha=0.13, lw=0)
    size.axhline(limit, color=COLOURS["fp16"], lw=2)
    note(size, say("limit"), (0.4, limit * 1.5), colour=COLOURS["fp16"], fontweight="bold")
    place = {"textcoords": "axes fraction"}
    bf16 = data["runs"]["bf16-mixed"]
    ends = [run for run in data["runs"].values() if run["cause"]]
    here = round(0.85 * len(bf16["largest"])) - 1
    to = here + 1, bf16["largest"][here]
    note(size, say("bf16"), (0.6, 0.45), to, colour=COLOURS["bf16"], **place)
    if ends:
        to = len(ends[0]["largest"]), ends[0]["largest"][-1]
        note(size, say("fp16"), (0.3, 0.1), to, colour=COLOURS["fp16"], **place)
    finish(size, "", say("size"))
    loss.set_ylim(0, 1.1 * max(max(run["loss"]) for run in data["runs"].values()))
    to = here + 1, bf16["loss"][here]
    note(loss, f"bf16: {bf16['loss'][-1]:.2f}", (0.68, 0.6), to, colour=COLOURS["bf16"], **place)
    if ends:
        to = len(ends[0]["loss"]), ends[0]["loss"][-1]
        note(loss, say("stop"), (0.35, 0.83), to, colour=COLOURS["fp16"], **place)
    finish(loss, say("step", rate=f"{data['learning_rate']:g}"), say("loss"))


def verdict(data: Data, say: Say) -> str:
    """Where fp16 stopped, at which loss scales, why, and what bf16 did."""
    runs = dict(data["runs"])
    bf16 = runs.pop("bf16-mixed")
    values = {"largest": f"{max(bf16['largest']):,.0f}", "bf16": f"{bf16['loss'][-1]:.2f}"}
    ended = {name: len(run["loss"]) + 1 for name, run in runs.items() if run["cause"]}
    if not ended:
        return say("verdict_none", **values)
    steps = say("join").join(say("at", run=name, step=step) for name, step in ended.items())
    cause = next(run["cause"] for run in runs.values() if run["cause"])
    return say("verdict", steps=steps, cause=cause, **values)


EXPERIMENT = Experiment("overflow", Options, measure, draw, verdict, size=(6.4, 7.4))
