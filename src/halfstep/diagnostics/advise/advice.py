"""``halfstep.advise``: the cheapest formats that a model tolerates, with evidence and proof."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.diagnostics.advise.choice import Chooser, rates_of
from halfstep.diagnostics.advise.layers import (
    HALF,
    REFERENCES,
    Formats,
    LossFn,
    by_layer,
    linear_layers,
    policy_of,
)
from halfstep.diagnostics.advise.proof import Gap, MakeOptimizer, Trials
from halfstep.diagnostics.advise.search import Search
from halfstep.diagnostics.advise.sensitivity import Sensitivity, sensitivities
from halfstep.errors import PrecisionError
from halfstep.precision.policy.recipe import KEPT, PRODUCTS, SCHEMES
from halfstep.shown import Text
from halfstep.words import Told, said, speaking

_told = Told("halfstep.diagnostics.advise")

_FP16 = "fp16-mixed"
_FLUSHED = 0.01
"""From which share of flushed gradients on they are evidence."""


@dataclass(frozen=True)
class Advice:
    """The cheapest formats that a model was found to tolerate.

    Attributes:
        formats: The format of each layer's products, by layer and product.
        policy: The same as a policy, to give to ``halfstep.Precision``.
        sensitivities: What each layer, product and format costs the gradient.
        error: What the chosen ones add up to.
        saved: Share of the time of linear layers that is saved, by the rates of the formats.
        gap: How much higher its loss was than the reference's, and what another run's gap stays
            below at 95 %; None where no run was made.
        floor: The least tolerance that the runs could prove; None where no run was made.
        needed: By layer, how much higher the loss was with that layer in the cheapest formats,
            where it was tried and did not hold.
        tolerance: What was asked for.
        proved: Whether the bound lies within the tolerance.
        verdict: All this in a sentence, in English; a command tells it in its own language.
    """

    formats: Formats
    policy: str
    sensitivities: tuple[Sensitivity, ...]
    error: float
    saved: float
    gap: Gap | None
    floor: float | None
    needed: Mapping[str, float]
    tolerance: float
    proved: bool
    verdict: str

    @property
    def base(self) -> str:
        """The format that most operations have; fp16 wherever fp32 is the reference."""
        if self.policy.startswith(_FP16):
            return HALF
        flops = {(s.layer, s.product): s.flops for s in self.sensitivities}
        count: Counter[str] = Counter()
        for key, form in self.formats.items():
            count[form] += flops[key]
        return count.most_common(1)[0][0]

    @property
    def exceptions(self) -> dict[str, tuple[str, ...]]:
        """The layers with another format than the base, and the formats of their products."""
        layers = by_layer(self.formats)
        return {n: forms for n, forms in layers.items() if set(forms) != {self.base}}

    def evidence(self, layer: str) -> str:
        """Why a layer is an exception: what cheaper formats cost it, and the median layer."""
        rows = {(s.layer, s.product, s.format): s for s in self.sensitivities}
        parts = []
        for product in PRODUCTS:
            form = self.formats[layer, product]
            row = rows.get((layer, product, self.base))
            if form == self.base:
                continue
            if row is None:
                parts.append(_told("no_whole_blocks", product=product, form=self.base))
                continue
            shown = max(row, rows[layer, product, form], key=lambda row: row.error)
            kind = (product, shown.format)
            every = [s.error for s in rows.values() if (s.product, s.format) == kind]
            known = {"product": product, "form": shown.format, "error": shown.error}
            text = _told("gradient_error", median=sorted(every)[len(every) // 2], **known)
            if row.overflowed:
                text = _told("overflow", text=text, share=row.overflowed)
            if row.flushed > _FLUSHED:
                text = _told("flushed", text=text, share=row.flushed)
            parts.append(text)
        if layer in self.needed:
            parts.insert(0, _told("cheapest", what=self._shown(self.needed[layer])))
        return _told("semicolon").join(parts)

    def _shown(self, gap: float) -> str:
        if gap == math.inf:
            return _told("breaks")
        return _told("loss_by", gap=gap) if gap > self.tolerance else _told("not_proved")

    def toml(self) -> str:
        """The policy file, with a line of evidence for each exception."""
        name = {KEPT: REFERENCES[KEPT], HALF: _FP16}.get(self.base, self.base)
        lines = [f"# {self.verdict}", f'base = "{name}"']
        if any(form in SCHEMES for form in self.formats.values()):
            lines.append("simulate = true  # where the device does not multiply these formats")
        if self.exceptions:
            lines.append("\n[rules]")
            for layer, forms in self.exceptions.items():
                with speaking("en"):
                    lines.append(f"# {self.evidence(layer)}")
                same = len(set(forms)) == 1
                table = ", ".join(f'{p} = "{f}"' for p, f in zip(PRODUCTS, forms, strict=True))
                lines.append(f'"{layer}" = ' + (f'"{forms[0]}"' if same else f"{{{table}}}"))
        return "\n".join(lines) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the policy file, which ``--precision`` and ``Precision`` read."""
        Path(path).write_text(self.toml(), encoding="utf-8")

    def __str__(self) -> str:
        lines = [said(self.verdict)]
        for layer, forms in self.exceptions.items():
            known = {"layer": layer, "formats": "/".join(dict.fromkeys(forms))}
            lines.append("  " + _told("exception", evidence=self.evidence(layer), **known))
        return Text("\n".join(lines))


def advise(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn,
    formats: Sequence[str] = ("bf16", "mxfp8", "nvfp4"),
    tolerance: float = 0.003,
    *,
    rates: str | Mapping[str, float] = "b200",
    steps: int = 60,
    seeds: Sequence[int] = (0, 1, 2),
    seconds: float = 600.0,
    optimizer: MakeOptimizer | None = None,
    measured_on: int = 2,
    max_error: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Advice:
    """Find the cheapest formats of a model's linear layers that keep its loss within a tolerance.

    Sensitivities come from products computed alone, the choice from a knapsack over them, and the
    proof from short runs of the chosen policy beside the reference. Where a choice does not hold,
    less error is allowed; exceptions that the loss does not need are taken back.

    Args:
        model: Plain, on its device, with weights worth measuring: errors of a model that was just
            initialised are others than later ones. It is not changed.
        batches: What ``loss_fn`` takes; at least one.
        loss_fn: From model and batch to the mean loss, a scalar; a function of these and of torch's
            random numbers alone.
        formats: The reference first: ``"bf16"`` with recipes such as ``"mxfp8"`` and ``"nvfp4"``,
            or ``"fp32"`` with ``"fp16"``, which answers which modules keep fp32.
        tolerance: How much higher the loss may be, relative: 0.003 for 0.3 %.
        rates: Whose peak rates count, ``"b200"``, ``"h200"`` or ``"h100"``; or rates of your own
            by format, in any unit.
        steps: Optimizer steps of each run of the proof; 0 leaves the proof out.
        seeds: One pair of runs for each; at least two. What is chosen by runs is proved on as many
            fresh ones, from the largest one on.
        seconds: When no further run is begun or continued.
        optimizer: Makes the optimizer of a run; default: AdamW with a learning rate of 0.001.
        measured_on: On how many batches sensitivities are measured.
        max_error: Choose by this squared relative error of the gradient, and prove that one choice.
        say: Is told what is done.

    Returns:
        The advice; ``proved`` is False, and the verdict says why, where the budget ended before.

    Raises:
        PrecisionError: If the tolerance lies below the noise of such runs, the formats do not go
            together, there is no linear layer, or ``loss_fn`` returns two losses for one batch.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        >>> batches = [torch.randn(64, 32) for _ in range(2)]
        >>> found = advise(model, batches, lambda model, x: (model(x) - x).square().mean(), steps=0)
        >>> found.base, found.proved
        ('nvfp4', False)
    """
    _check(formats, tolerance, steps, seeds, batches)
    until = time.monotonic() + seconds
    rate = rates_of(rates, formats)
    linear_layers(model)  # refused here where there is none
    say(_told("measuring", count=len(formats) - 1))
    found = sensitivities(model, batches[:measured_on], loss_fn, formats)
    chooser = Chooser(found, rate)
    trials = Trials(
        model, batches, loss_fn, optimizer or _adamw, REFERENCES[formats[0]], steps, seeds, until
    )
    search = Search(chooser, trials, tolerance, say)
    reason = search.run(math.inf if max_error is None else max_error, once=max_error is not None)
    saved = chooser.saved(search.chosen)
    whose = _told.phrase("given_rates")
    if isinstance(rates, str):
        whose = _told.phrase("peak_rates", device=rates)
    known = {"saved": saved, "whose": whose, "reason": reason}
    verdict = _told.phrase("unproved", **known)
    if search.proved:
        verdict = _told.phrase("proved", **known)
    return Advice(
        formats=search.chosen,
        policy=policy_of(search.chosen, formats[0]),
        sensitivities=tuple(found),
        error=chooser.error(search.chosen),
        saved=saved,
        gap=search.gap,
        floor=search.floor,
        needed=search.needed,
        tolerance=tolerance,
        proved=search.proved,
        verdict=verdict,
    )


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _check(
    formats: Sequence[str], tolerance: float, steps: int, seeds: Sequence[int], batches: Any
) -> None:
    allowed = {"bf16": tuple(SCHEMES), "fp32": (HALF,)}
    first = formats[0] if formats else ""
    if len(formats) < 2 or any(form not in allowed.get(first, ()) for form in formats[1:]):
        raise PrecisionError(
            f"formats {', '.join(formats)!r}; allowed: bf16 and then {', '.join(SCHEMES)}, or fp32 "
            "and then fp16"
        )
    if not isinstance(tolerance, Real) or not tolerance > 0:
        raise PrecisionError(
            f"tolerance={tolerance!r}; allowed: a number above 0, such as 0.003 for 0.3 %"
        )
    if not isinstance(batches, Sequence):
        raise PrecisionError(
            f"batches is a {type(batches).__name__}; every run takes them again, so give a list: "
            "list(batches), or some of them by itertools.islice"
        )
    if not batches:
        raise PrecisionError("batches is empty; every run takes them again, so give at least one")
    if steps < 0 or (0 < steps < 4) or len(set(seeds)) < 2:
        raise PrecisionError(
            f"steps={steps}, seeds={[*seeds]}; allowed: 4 steps or more, or 0 for no proof, with 2 "
            "different seeds or more"
        )
