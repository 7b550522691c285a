"""What one training step holds, by part and dtype: mixed precision does not halve all of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.diagnostics.memory.saved import MemoryMeter
from halfstep.diagnostics.memory.table import PARTS, size_text
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.figure import LETTERS, finish
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.report.figures import INK
from halfstep.trainer.config.read import AtLeast1
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig

POLICIES = ("fp32", "bf16-mixed", "bf16-split", "bf16-split,moments=8bit")
MIXED = "bf16-mixed"
LAYERS, LENGTH = 4, 64
SHOWN = {
    "weights": "#0072b2",
    "masters": "#8a8f98",
    "gradients": "#d55e00",
    "moments": "#b57c00",
    "cast copies": "#f0e442",
    "activations": "#009e73",
    "logits": "#cc79a7",
}
"""Parts of :data:`PARTS` to colours of Okabe and Ito's palette."""
STATE = ("weights", "masters", "gradients", "moments")


@dataclass(frozen=True)
class Options:
    """Sequences of the batch, the GPT's width, and its vocabulary."""

    sequences: AtLeast1 = 16
    width: AtLeast1 = 192
    vocabulary: AtLeast1 = 4000


class _Plain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Only torch's own operations, as in most models: halfstep's kernels save less on some CPUs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def measure(options: Options) -> Data:
    """One step of the same GPT under each policy, and what it held."""
    found = {}
    for policy in POLICIES:
        shape = GPTConfig(
            n_layer=LAYERS,
            n_head=1,
            n_embd=options.width,
            block_size=LENGTH,
            vocab_size=options.vocabulary,
        )
        model = GPT(shape)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            options.vocabulary, (options.sequences, LENGTH + 1), generator=generator
        )
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with (
            Precision(policy, model, AdamW(model.parameters())) as precision,
            _Plain(),  # type: ignore[no-untyped-call]
            MemoryMeter(precision, (inputs, targets), logits=options.vocabulary) as meter,
        ):
            with precision.autocast():
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            precision.step(loss)
        found[policy] = {part: dict(meter.memory.bytes.get(part, {})) for part in PARTS}
    return {**asdict(options), "bytes": found}


def _total(parts: dict[str, dict[str, int]]) -> int:
    return sum(sum(forms.values()) for forms in parts.values())


def draw(figure: Any, data: Data, say: Say) -> None:
    """A column for each policy, of parts; what is fp32 is hatched."""
    axes = figure.subplots()
    whole = _total(data["bytes"]["fp32"])
    for at, (policy, parts) in enumerate(data["bytes"].items()):
        bottom = 0.0
        for part, colour in SHOWN.items():
            here = bottom
            for form, size in sorted(parts[part].items()):
                hatch = "///" if form == "fp32" and policy != "fp32" else None
                axes.bar(
                    at, size, 0.86, bottom, color=colour, alpha=0.75, hatch=hatch, edgecolor="white"
                )
                bottom += size
            if bottom - here > 0.035 * whole:
                shown = say(part.replace(" ", "_"), size=f"{(bottom - here) / 1e6:.3g}")
                wide = parts[part].get("fp32", 0)
                if policy != "fp32" and 0 < wide < 0.99 * (bottom - here):
                    shown += "\n" + say("of_it", size=f"{wide / 1e6:.3g}")
                box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.6}
                middle = (here + bottom) / 2
                axes.text(
                    at, middle, shown, ha="center", va="center", fontsize=LETTERS - 2, bbox=box
                )
        shown = say("total", size=size_text(bottom), share=bottom / whole)
        axes.text(at, bottom + 0.01 * whole, shown, ha="center", va="bottom", fontweight="bold")
    axes.axhline(whole / 2, color=INK, ls="--", lw=1.2)
    axes.text(3.52, whole / 2, say("half"), va="bottom")
    axes.set_xlim(-0.5, 4.15)
    names = [policy.replace(",", ",\n") for policy in data["bytes"]]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    axes.set_ylim(0, 1.16 * max(map(_total, data["bytes"].values())))
    finish(axes, "", say("hatched"), say("axis", layers=LAYERS, length=LENGTH, **data))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


def verdict(data: Data, say: Say) -> str:
    """How much less mixed precision holds, and what of it stays in fp32 or comes on top."""
    whole, mixed = _total(data["bytes"]["fp32"]), data["bytes"][MIXED]
    total = _total(mixed)

    def share(*parts: str) -> float:
        return sum(sum(mixed[part].values()) for part in parts) / total

    least = min(POLICIES, key=lambda policy: _total(data["bytes"][policy]))
    fp32 = sum(forms.get("fp32", 0) for forms in mixed.values())
    return say(
        "verdict" if total < whole else "verdict_more",
        ratio=total / whole,
        fp32=fp32 / total,
        state=share(*STATE),
        rest=(fp32 / total - share(*STATE)),
        copies=share("cast copies"),
        least=least,
        least_ratio=_total(data["bytes"][least]) / whole,
    )


EXPERIMENT = Experiment("memory", Options, measure, draw, verdict, size=(6.4, 6.4))
