"""Steps of two policies in turn, over widths and batches: where 16 bits pay and where not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.lab import material
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish
from halfstep.optim import AdamW
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.policy.devices import cpu_has_bf16, cpu_name
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.report.figures import INK
from halfstep.trainer.config.read import AtLeast1

BASE = "fp32"
WIDTHS = (64, 128, 256, 512)
SEQUENCES = (1, 2, 4, 8, 16)
LAYERS, LENGTH, OF_WIDTHS, WARM_UP = 2, 64, 8, 2
PAYS = 1.05
"""From this ratio on a policy is said to pay; below its inverse to cost."""


@dataclass(frozen=True)
class Options:
    """The policy beside fp32, the width at which batches vary, and pairs of steps."""

    policy: str = "bf16-mixed"
    width: AtLeast1 = 256
    rounds: AtLeast1 = 7


def measure(options: Options) -> Data:
    """The ratio of tokens per second to fp32's, in pairs of steps one after the other.

    Raises:
        ConfigError: For a policy that this device refuses.
    """
    policy = str(parse_policy(options.policy))
    require_support(parse_policy(policy), torch.device("cpu"))
    if policy == BASE:
        raise ConfigError(f"policy={options.policy}: {BASE} is what it is compared with")
    rounds = options.rounds
    return {
        "policy": policy,
        "processor": cpu_name(),
        "instructions": cpu_has_bf16(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "width": options.width,
        "of_widths": OF_WIDTHS,
        "widths": [{"at": w, **_pairs(policy, w, OF_WIDTHS, rounds)} for w in WIDTHS],
        "sequences": [{"at": s, **_pairs(policy, options.width, s, rounds)} for s in SEQUENCES],
    }


def _pairs(policy: str, width: int, sequences: int, rounds: int) -> dict[str, float]:
    """Median and quartiles of the ratio, over pairs: a neighbour's load hits both alike."""
    batch = next(material.batches(sequences, LENGTH, seed=0))
    runs = []
    for name in (BASE, policy):
        model = material.gpt(LAYERS, width, LENGTH)
        runs.append((model, Precision(name, model, AdamW(model.parameters()))))
    ratios = []
    for number in range(WARM_UP + rounds):
        spent = []
        for model, precision in runs:
            begin = time.perf_counter()
            with precision.autocast():
                loss = material.loss_of(model, batch)
            precision.step(loss)
            spent.append(time.perf_counter() - begin)
        if number >= WARM_UP:
            ratios.append(spent[0] / spent[1])
    for _, precision in runs:
        precision.close()
    low, _, high = quantiles(ratios, n=4) if rounds > 1 else (ratios[0],) * 3
    return {"ratio": median(ratios), "low": low, "high": high}


def draw(figure: Any, data: Data, say: Say) -> None:
    """The ratio over widths, and over batches; below 1 is slower."""
    panels = figure.subplots(2, sharey=True)
    where = say("on" if data["instructions"] else "on_without", **data)
    spread_of = {"widths": say("spread", rounds=data["rounds"]), "sequences": _twice(data, say)}
    colour = COLOURS.get(data["policy"].partition("-")[0], INK)
    for axes, what in zip(panels, ("widths", "sequences"), strict=True):
        rows = data[what]
        at, ratios = [row["at"] for row in rows], [row["ratio"] for row in rows]
        spread = [
            [r["ratio"] - r["low"] for r in rows],
            [r["high"] - r["ratio"] for r in rows],
        ]
        axes.axhspan(0, 1, color="#d55e00", alpha=0.08, lw=0)
        axes.axhline(1, color=INK, lw=1.2)
        axes.errorbar(at, ratios, spread, fmt="-o", color=colour, lw=2.2, capsize=3)
        for x, ratio, after in zip(at, ratios, [*ratios[1:], ratios[-1]], strict=True):
            place = {"textcoords": "offset points", "color": colour}
            axes.annotate(f"{ratio:.2f}", (x, ratio), (6, 6 if after <= ratio else -15), **place)
        if _twice(data, say):
            here = data["width"] if what == "widths" else data["of_widths"]
            axes.plot(here, ratios[at.index(here)], "o", color=INK, ms=14, mfc="none", mew=1.6)
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(x) for x in at])
        axes.minorticks_off()
        axes.set_xlim(at[0] / 1.25, at[-1] * 1.35)
        axes.text(at[0] / 1.2, 0.06, say("slower"), color="#a04000", va="bottom")
        axes.text(at[-1] * 1.3, 1.06, say("faster"), ha="right", va="bottom")
        told = {"sequences": data["of_widths"], "width": data["width"], "length": LENGTH}
        parts = [where] if what == "widths" else []
        parts += [say(f"{what}_title", **told), say("ratio", policy=data["policy"])]
        finish(axes, say(f"{what}_axis"), spread_of[what], "\n".join(parts))
    highest = max(row["high"] for what in ("widths", "sequences") for row in data[what])
    panels[0].set_ylim(0, max(1.3, 1.15 * highest))


def _twice(data: Data, say: Say) -> str:
    """What to say of the setting that both panels have; empty where there is none."""
    widths, sequences = ([row["at"] for row in data[what]] for what in ("widths", "sequences"))
    there = data["width"] in widths and data["of_widths"] in sequences
    return say("twice") if there else ""


def verdict(data: Data, say: Say) -> str:
    """From which width on the policy pays here, if it does at all."""
    rows = data["widths"]
    values = {
        "policy": data["policy"],
        "least": rows[0]["ratio"],
        "narrow": rows[0]["at"],
        "most": rows[-1]["ratio"],
        "wide": rows[-1]["at"],
        "one": data["sequences"][0]["ratio"],
        "many": data["sequences"][-1]["ratio"],
        "sequences": data["sequences"][-1]["at"],
        "width": data["width"],
    }
    pays = [row["ratio"] >= PAYS for row in rows]
    values["best"] = max(row["ratio"] for row in rows)
    if all(pays):
        return say("verdict_always", **values)
    if not any(pays):
        return say("verdict_never" if data["instructions"] else "verdict_without", **values)
    first = pays.index(True)
    if not all(pays[first:]):
        return say("verdict_some", **values)
    return say("verdict", pays=rows[first]["at"], **values)


EXPERIMENT = Experiment("speed", Options, measure, draw, verdict, size=(6.4, 8.0))
