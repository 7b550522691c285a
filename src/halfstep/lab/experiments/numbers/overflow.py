"""Activations that outgrow fp16: the loss is NaN at any loss scale, and bf16 does not notice.

A trained GPT gets a residual stream 2^k times as large: what goes into it is multiplied by 2^k, and
each LayerNorm, which divides by the size of what it reads, takes the factor out again. All these
models compute the same function; they differ in the size of their numbers alone, as trained models
do whose activations have grown.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.diagnostics.nonfinite.again import first_cause
from halfstep.formats import FP16
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish, note, power
from halfstep.lab.material import Batch, batches, gpt, loss_of, train
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.report.figures import INK
from halfstep.trainer.config.read import AtLeast1
from halfstep.trainer.models.gpt.gpt import GPT

SEQUENCES, LENGTH = 16, 64
LOSS_SCALES = (1, 65536)
POLICIES = {
    "fp32": "fp32",
    "bf16": "bf16-mixed",
    **{f"fp16 {s}": f"compute=fp16,scale=static,init_scale={s}" for s in LOSS_SCALES},
}


@dataclass(frozen=True)
class Options:
    """How often activations double, steps of training before, and layers."""

    powers: AtLeast1 = 20
    steps: AtLeast1 = 60
    layers: AtLeast1 = 2


def measure(options: Options) -> Data:
    """The loss in each precision of a model whose activations grow, and what first overflows."""
    model = gpt(options.layers, 128, LENGTH)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    train("fp32", model, optimizer, batches(SEQUENCES, LENGTH, seed=0), options.steps, warmup=20)
    batch = next(batches(SEQUENCES, LENGTH, seed=0, held_out=True))
    data: Data = {"limit": FP16.max, "powers": options.powers, "largest": [], "cause": None}
    data["losses"] = {name: [] for name in POLICIES}
    for exponent in range(options.powers + 1):
        grown = enlarged(model, 2.0**exponent)
        data["largest"].append(largest_output(grown, batch))
        for name, policy in POLICIES.items():
            loss, cause = _loss(policy, grown, batch, tell=data["cause"] is None)
            data["losses"][name].append(loss)
            data["cause"] = data["cause"] or cause
    return data


def enlarged(model: GPT, factor: float) -> GPT:
    """The same function, with a residual stream ``factor`` times as large."""
    model = copy.deepcopy(model)
    for embedding in (model.wte, model.wpe):  # the head uses the table, which stays as it is
        embedding.register_forward_hook(lambda module, inputs, output: output * factor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in ("proj", "down"):
                parameter.mul_(factor)
    return model


@torch.no_grad()
def largest_output(model: GPT, batch: Batch) -> float:
    """The largest magnitude that leaves a linear layer, in fp32."""
    seen: list[float] = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(float(output.abs().max()))

    handles = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.Linear)]
    model(batch[0])
    for handle in handles:
        handle.remove()
    return max(seen)


def _loss(policy: str, model: GPT, batch: Batch, *, tell: bool) -> tuple[float | None, Data | None]:
    """The loss, or None and the first cause where it is not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Precision(policy, model, optimizer) as precision, precision.autocast():
        loss = loss_of(model, batch).item()
        if math.isfinite(loss) or not tell:
            return (loss if math.isfinite(loss) else None), None
    with Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.0)) as precision:
        cause = first_cause(precision, lambda batch: loss_of(model, batch), batch)
    return None, None if cause is None else {"module": cause.module, "operation": cause.op}


def draw(figure: Any, data: Data, say: Say) -> None:
    """The loss over the size of the largest activation, and the limit of fp16."""
    axes, losses, limit = figure.subplots(), data["losses"], math.log2(data["limit"])
    sizes = [math.log2(size) for size in data["largest"]]
    top, last = 1.6 * max(losses["fp32"]), sizes[-1] + 0.5
    axes.set(xlim=(sizes[0] - 0.5, max(last, limit + 3)), ylim=(0, 1.25 * top))
    axes.axvspan(limit, axes.get_xlim()[1], color=COLOURS["fp16"], alpha=0.13, lw=0)
    axes.axvline(limit, color=COLOURS["fp16"], lw=2)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "va": "top", "ha": "right"}
    note(axes, say("limit"), (limit - 0.2, 0.38), colour=COLOURS["fp16"], **place)
    axes.plot(sizes, losses["fp32"], color=COLOURS["fp32"], lw=2)
    axes.plot(sizes, losses["bf16"], "o", color=COLOURS["bf16"], ms=7)
    fp16 = losses[f"fp16 {LOSS_SCALES[0]}"]
    kept = [(size, loss) for size, loss in zip(sizes, fp16, strict=True) if loss is not None]
    if kept:
        axes.plot(*zip(*kept, strict=True), "s", color=COLOURS["fp16"], ms=12, mfc="none", mew=2)
    gone = [size for size, loss in zip(sizes, fp16, strict=True) if loss is None]
    axes.plot(gone, [top] * len(gone), "X", color=COLOURS["fp16"], ms=10)
    how: dict[str, Any] = {"textcoords": "axes fraction"}
    numbers = range(math.ceil(1.3 * max(losses["fp32"])))
    axes.set_yticks([*numbers, *[top] * bool(gone)], [*map(str, numbers), *["NaN"] * bool(gone)])
    if gone:  # above the numbers, since NaN is none
        axes.axhline(0.86 * top, color=INK, lw=1, ls=(0, (4, 4)))
        note(axes, say("nan"), (0.27, 0.88), (gone[0], top), colour=COLOURS["fp16"], **how)
    to = sizes[-1], losses["bf16"][-1]
    note(axes, say("bf16"), (0.74, 0.13), to, colour=COLOURS["bf16"], **how)
    middle = len(sizes) // 2
    to = (sizes[middle - 1] + sizes[middle]) / 2, losses["fp32"][middle]
    note(axes, say("fp32"), (0.36, 0.15), to, colour=COLOURS["fp32"], **how)
    note(axes, say("fp16"), (0.05, 0.15), (sizes[2], fp16[2] or top), colour=COLOURS["fp16"], **how)
    ticks = range(math.ceil(sizes[0] / 4) * 4, int(axes.get_xlim()[1]) + 1, 4)
    axes.set_xticks(ticks, map(power, ticks))
    finish(axes, say("size"), say("loss"))


def verdict(data: Data, say: Say) -> str:
    """From which size on fp16 fails, at which loss scales, where, and what bf16 makes of it."""
    losses = data["losses"]
    exact = losses["fp32"]
    off = max(abs(a - b) for a, b in zip(losses["bf16"], exact, strict=True))
    values = {"largest": f"{max(data['largest']):,.0f}", "off": f"{off:.1g}"}
    failed = {scale: _first_none(losses[f"fp16 {scale}"]) for scale in LOSS_SCALES}
    if None in failed.values():
        return say("verdict_none", **values)
    first = [f"{data['largest'][step]:,.0f}" for step in failed.values() if step is not None]
    cause = data["cause"]
    where = f"{cause['operation']}, {cause['module']}" if cause else "?"
    told = "verdict" if first[0] != first[1] else "verdict_same"
    return say(told, one=first[0], two=first[1], where=where, **values)


def _first_none(losses: list[float | None]) -> int | None:
    return next((index for index, loss in enumerate(losses) if loss is None), None)


EXPERIMENT = Experiment("overflow", Options, measure, draw, verdict, size=(6.4, 5.4))
