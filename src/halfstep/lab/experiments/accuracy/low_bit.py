"""Recipes below 16 bits on a small GPT: how far a gradient is off, and what averages away."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.lab import material
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, LETTERS, at_end, finish
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.report.figures import INK
from halfstep.trainer.config.read import AtLeast1, Count

LAYERS, WIDTH, LENGTH = 3, 64, 64
RATE = 3e-3


@dataclass(frozen=True)
class Options:
    """Draws of random bits, steps of training, and the block that stays in bf16."""

    draws: AtLeast1 = 16
    trained: AtLeast1 = 100
    kept_block: Count = 0


def measure(options: Options) -> Data:
    """Errors of one batch's gradient, and losses of short runs, by recipe."""
    block = options.kept_block % LAYERS
    policies = {
        "bf16": "bf16-mixed",
        "fp8": "fp8,simulate=yes",
        "mxfp8": "mxfp8,simulate=yes",
        "nvfp4": "nvfp4,simulate=yes",
        "kept": f"nvfp4,simulate=yes,keep_bf16=layers.{block}*",
    }
    model = material.gpt(LAYERS, WIDTH, LENGTH)
    optimizer = AdamW(model.parameters(), lr=RATE)
    data = material.batches(16, LENGTH, seed=0)
    material.train("fp32", model, optimizer, data, options.trained, warmup=20)
    batch = next(data)
    (truth,) = _gradients("fp32", model, batch, 1)

    def error(found: list[Tensor]) -> float:
        return float((torch.stack(found).mean(0) - truth).norm() / truth.norm())

    errors = {}
    for name, policy in policies.items():
        found = _gradients(policy, model, batch, options.draws)
        errors[name] = {"one": error(found[:1]), "mean": error(found)}
    blocks = [
        error(_gradients(f"bf16-mixed,simulate=yes,rules=layers.{b}*:nvfp4", model, batch, 1))
        for b in range(LAYERS)
    ]
    return {
        "draws": options.draws,
        "trained": options.trained,
        "kept_block": block,
        "errors": errors,
        "blocks": blocks,
        "losses": {name: _trained(policy, options.trained) for name, policy in policies.items()},
    }


def _gradients(policy: str, model: Any, batch: material.Batch, draws: int) -> list[Tensor]:
    """The blocks' gradient as one vector, several times with other random bits."""
    found = []
    with Precision(policy, model, AdamW(model.parameters())) as precision:
        for _ in range(draws):
            with precision.autocast():
                loss = material.loss_of(model, batch)
            precision.backward(loss)
            found.append(torch.cat([p.grad.flatten().double() for p in model.layers.parameters()]))
            precision.discard()
    return found


def _trained(policy: str, steps: int) -> float:
    """The validation loss after training with the recipe from the start."""
    model = material.gpt(LAYERS, WIDTH, LENGTH)
    optimizer = AdamW(model.parameters(), lr=RATE)
    data = material.batches(8, LENGTH, seed=0)
    ends: list[float] = []

    def look(step: int, precision: Precision) -> None:
        if step == steps:
            ends.append(material.validation(precision, model, LENGTH))

    material.train(policy, model, optimizer, data, steps, warmup=20, after=look)
    return ends[0]


def draw(figure: Any, data: Data, say: Say) -> None:
    """Bars by recipe, of one draw and of the mean of many; then the error that each block makes."""
    recipes, blocks = figure.subplots(2, height_ratios=(2.2, 1), sharex=True)
    _draw_recipes(recipes, data, say)
    errors = [100 * error for error in data["blocks"]]
    blocks.barh(range(len(errors)), errors, 0.6, color=COLOURS["e2m1"])
    for row, error in enumerate(errors):
        at_end(blocks, error, row, f"{error:.1f}")
    blocks.set_yticks(range(len(errors)), [say("block", number=b) for b in range(len(errors))])
    blocks.invert_yaxis()
    finish(blocks, "", say("error"), say("blocks"))
    blocks.set_xlim(0, blocks.get_xlim()[1] * 1.1)
    blocks.locator_params(axis="x", nbins=5, integer=True)
    recipes.tick_params(labelbottom=True)
    for axes in (recipes, blocks):
        axes.set_axisbelow(True)
        axes.yaxis.grid(visible=False)


def _draw_recipes(axes: Any, data: Data, say: Say) -> None:
    """Two bars for each recipe, with one label where nothing is random and they are the same."""
    names, kinds = [*data["errors"]], {"one": COLOURS["fp16"], "mean": COLOURS["bf16"]}
    for row, name in enumerate(names):
        errors = {kind: 100 * data["errors"][name][kind] for kind in kinds}
        same = data["draws"] > 1 and math.isclose(errors["one"], errors["mean"], rel_tol=1e-6)
        for (kind, colour), place in zip(kinds.items(), (row - 0.2, row + 0.2), strict=True):
            axes.barh(place, errors[kind], 0.38, color=colour)
            if not same:
                at_end(axes, errors[kind], place, f"{errors[kind]:.1f}", colour)
        if same:
            at_end(axes, errors["one"], row, say("same", error=errors["one"]))
    labels = [say(f"recipe_{name}", block=data["kept_block"]) for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.invert_yaxis()
    finish(axes, "", say("error"), say("recipes"))
    shown = say("one_draw"), say("mean", draws=data["draws"])
    bars = axes.containers[0], axes.containers[1]
    how = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2, "frameon": False}
    axes.legend(bars, shown, fontsize=LETTERS, borderaxespad=0.1, handlelength=1, **how)
    axes.set_title(axes.get_title("left"), loc="left", fontsize=LETTERS, color=INK, pad=28)


def verdict(data: Data, say: Say) -> str:
    """How far off the recipes are, whether keeping the block helps, and what they cost in loss."""
    errors, losses = data["errors"], data["losses"]
    worst = max(range(len(data["blocks"])), key=data["blocks"].__getitem__)
    helped = errors["kept"]["one"] < 0.7 * errors["nvfp4"]["one"]
    return say(
        "verdict" if helped else "verdict_other",
        mxfp8=errors["mxfp8"]["one"],
        nvfp4=errors["nvfp4"]["one"],
        kept=errors["kept"]["one"],
        mean=errors["nvfp4"]["mean"],
        block=data["kept_block"],
        worst=worst,
        draws=data["draws"],
        steps=data["trained"],
        lost=losses["nvfp4"] - losses["bf16"],
        kept_lost=losses["kept"] - losses["bf16"],
    )


EXPERIMENT = Experiment("low-bit", Options, measure, draw, verdict, size=(6.2, 7.2))
