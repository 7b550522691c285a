"""Many small terms added up: a 16-bit sum drifts and then stands still, an fp32 sum does not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from halfstep.lab import material
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import COLOURS, finish
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.report.figures import PAPER
from halfstep.trainer.config.read import AtLeast1, Positive

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ADDED = {"bf16": "bf16-pure", "fp32": "bf16-split"}
"""Format in which gradients of micro-batches add up to a policy; both have bf16 weights."""
TERMS, SIDE = 1000, 16
LENGTH, WARMUP = 64, 30


@dataclass(frozen=True)
class Options:
    """The term of the sum by itself, the products' length, and how many micro-batches."""

    term: Positive = 1e-3
    length: AtLeast1 = 4096
    micro_batches: AtLeast1 = 64


def measure(options: Options) -> Data:
    """A sum by itself, the sums of a matrix product, and the sum of a GPT's gradients."""
    lengths = [k for k in (4**i for i in range(1, 12)) if k < options.length] + [options.length]
    products = {
        f"{name} {accumulator}": [
            _product_error(DTYPES[name], DTYPES[accumulator], k) for k in lengths
        ]
        for name in ("bf16", "fp16")
        for accumulator in (name, "fp32")
    }
    counts = [k for k in (2**i for i in range(20)) if k < options.micro_batches]
    counts.append(options.micro_batches)
    return {
        "term": options.term,
        "sums": {
            name: material.running_sum(0.0, options.term, TERMS, dtype)
            for name, dtype in DTYPES.items()
        },
        "gains": _gains(options.term),
        "lengths": lengths,
        "products": products,
        "micro_batches": counts,
        "gradients": _gradients(counts),
    }


def _gains(term: float) -> list[dict[str, float]]:
    """What a term adds to a bf16 sum, wherever that stays the same for a tenth of all terms."""
    totals = material.running_sum(0.0, term, TERMS, torch.bfloat16)
    gains = [after - before for before, after in pairwise(totals)]
    found, first = [], 0
    for gain, same in groupby(gains):
        last = first + len([*same])
        if last - first >= TERMS / 10:
            found.append({"first": first, "last": last, "gain": gain})
        first = last
    return found


def _product_error(operands: torch.dtype, accumulator: torch.dtype, length: int) -> float:
    """Relative error of a product of positive 16-bit matrices against fp64, in Frobenius norm.

    A product of two 16-bit numbers is exact in fp32, so only the additions round.
    """
    generator = torch.Generator().manual_seed(length)
    a = torch.rand(SIDE, length, generator=generator).to(operands)
    b = torch.rand(length, SIDE, generator=generator).to(operands)
    total = torch.zeros(SIDE, SIDE, dtype=accumulator)
    for column, row in zip(a.float().unbind(1), b.float().unbind(0), strict=True):
        total = (total.float() + column[:, None] * row).to(accumulator)
    exact = a.double() @ b.double()
    return float((total.to(operands).double() - exact).norm() / exact.norm())


def _gradients(counts: list[int]) -> dict[str, list[float]]:
    """Relative error of a GPT's gradient after some micro-batches, by the format of the sum.

    The truth is the fp64 sum of the gradients of single micro-batches, as each arrives.
    """
    torch.manual_seed(0)
    model = material.gpt(layers=2, width=64, length=LENGTH)
    material.train(
        "fp32",
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        material.batches(8, LENGTH, seed=0),
        WARMUP,
    )
    state = model.state_dict()
    return {name: _errors_of_sums(policy, state, counts) for name, policy in ADDED.items()}


def _errors_of_sums(policy: str, state: dict[str, Tensor], counts: list[int]) -> list[float]:
    model = material.gpt(layers=2, width=64, length=LENGTH)
    model.load_state_dict(state)
    source = material.batches(1, LENGTH, seed=1)
    batches = [next(source) for _ in range(counts[-1])]
    with Precision(policy, model, AdamW(model.parameters())) as precision:

        def backward(batch: material.Batch) -> Tensor:
            with precision.autocast():
                loss = material.loss_of(model, batch) / len(batches)
            precision.backward(loss)
            return torch.cat(
                [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
            )

        exact, total = [], torch.zeros(())
        for batch in batches:
            total = total + backward(batch)
            precision.discard()
            exact.append(total)
        added = [backward(batch) for batch in batches]
        precision.discard()
    return [float((added[k - 1] - exact[k - 1]).norm() / exact[k - 1].norm()) for k in counts]


def draw(figure: Any, data: Data, say: Say) -> None:
    """A sum, the sums of a product, and a sum of gradients, below each other."""
    alone, products, gradients = figure.subplots(3, height_ratios=(1.3, 1, 1))
    _draw_sums(alone, data, say)
    for label, errors in data["products"].items():
        operands, accumulator = label.split()
        style = "--o" if accumulator == "fp32" else "-s"
        per_cent = [100 * error for error in errors]
        products.plot(data["lengths"], per_cent, style, color=COLOURS[operands], ms=4, lw=2)
        shown = say("sums_in", operands=operands, accumulator=accumulator, error=per_cent[-1])
        _name(products, data["lengths"], per_cent, shown, COLOURS[operands])
    for name, errors in data["gradients"].items():
        per_cent = [100 * error for error in errors]
        gradients.plot(data["micro_batches"], per_cent, "-o", color=COLOURS[name], ms=4, lw=2)
        told = say("added_in", format=name, error=errors[-1])
        _name(gradients, data["micro_batches"], per_cent, told, COLOURS[name])
    products.set_yscale("log")
    products.margins(y=0.12)
    gradients.margins(y=0.15)
    products.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes, what in ((products, "lengths"), (gradients, "micro_batches")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(data[what], [str(k) for k in data[what]])
        axes.minorticks_off()
        axes.set_xlim(data[what][0] * 0.9, data[what][-1] ** 1.55)
        finish(axes, say(f"{what}_axis"), say(f"{what}_error"), say(f"{what}_title"))


def _name(axes: Any, at: list[int], values: list[float], text: str, colour: str) -> None:
    how = {"textcoords": "offset points", "va": "center", "color": colour, "zorder": 9}
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
    axes.annotate(text, (at[-1], values[-1]), (7, 0), bbox=box, **how)


def _draw_sums(axes: Any, data: Data, say: Say) -> None:
    term = data["term"]
    for name, totals in data["sums"].items():
        axes.plot(totals, color=COLOURS[name], lw=2.4)
        axes.annotate(
            f"{name} {totals[-1]:.4g}",
            (TERMS, totals[-1]),
            (6, -8 if name == "fp16" else 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[name],
        )
    for part in data["gains"][-2:]:
        middle = int(part["first"] + part["last"]) // 2
        steeper = part["gain"] > term  # then above its line, where no other line is
        axes.annotate(
            say("counts_as", term=term, gain=part["gain"]),
            (middle, data["sums"]["bf16"][middle]),
            (-6, 46) if steeper else (0, -30),
            textcoords="offset points",
            ha="center",
            color=COLOURS["bf16"],
            arrowprops={"arrowstyle": "->", "color": COLOURS["bf16"]},
        )
    axes.set_xlim(0, TERMS * 1.25)
    axes.set_xticks(range(0, TERMS + 1, TERMS // 4))
    finish(axes, say("sum_axis", term=term), title=say("sum_title", terms=TERMS, term=term))


def verdict(data: Data, say: Say) -> str:
    """What each of the three sums lost in 16 bits; short sums lose little."""
    wide = data["products"]["bf16 fp32"][-1]
    values = {
        "terms": TERMS,
        "term": data["term"],
        "exact": TERMS * data["term"],
        "bf16": data["sums"]["bf16"][-1],
        "length": data["lengths"][-1],
        "narrow": data["products"]["bf16 bf16"][-1],
        "wide": wide,
        "count": data["micro_batches"][-1],
        "gradient": data["gradients"]["bf16"][-1],
        "gradient_fp32": data["gradients"]["fp32"][-1],
    }
    return say("verdict_short" if values["narrow"] < 2 * wide else "verdict", **values)


EXPERIMENT = Experiment("accumulation", Options, measure, draw, verdict, size=(6.2, 9.0))
