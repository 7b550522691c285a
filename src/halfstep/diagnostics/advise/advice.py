"""``halfstep.advise``: the cheapest formats that a model tolerates, with evidence and proof."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.diagnostics.advise.choice import Option, cheapest, rates_of
from halfstep.diagnostics.advise.layers import (
    HALF,
    REFERENCES,
    Formats,
    LossFn,
    by_layer,
    linear_layers,
    policy_of,
)
from halfstep.diagnostics.advise.proof import Gap, MakeOptimizer, OutOfTime, Trials
from halfstep.diagnostics.advise.sensitivity import Sensitivity, sensitivities
from halfstep.errors import PrecisionError
from halfstep.precision.policy.recipe import KEPT, PRODUCTS, SCHEMES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.shown import Text

Key = tuple[str, str]
"""A layer's name and a product's."""
_TIGHTER = 0.5
"""By what a limit that could not be proved is multiplied."""
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
        saved: Share of the time of linear layers that is saved, by a table of peak rates.
        device: Of those rates.
        gap: How much higher its loss was than the reference's, with the bound at 95 %; None where
            no run was made.
        floor: The least tolerance that the runs could prove; None where no run was made.
        tolerance: What was asked for.
        proved: Whether the bound lies within the tolerance.
        verdict: All this in a sentence.
    """

    formats: Formats
    policy: str
    sensitivities: tuple[Sensitivity, ...]
    error: float
    saved: float
    device: str
    gap: Gap | None
    floor: float | None
    tolerance: float
    proved: bool
    verdict: str

    @property
    def base(self) -> str:
        """The format that most operations have."""
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
        """Why a layer is an exception: what the base format would cost it, and the median layer."""
        rows = {(s.layer, s.product, s.format): s for s in self.sensitivities}
        parts = []
        for product in PRODUCTS:
            form = self.formats[layer, product]
            row = rows.get((layer, product, self.base))
            if form == self.base:
                continue
            if row is None:
                parts.append(f"{product}: its features fill no whole blocks of {self.base}")
                continue
            shown = max(row, rows[layer, product, form], key=lambda row: row.error)
            every = [s.error for s in rows.values() if (s.product, s.format) == _kind(shown)]
            text = f"{product}: gradient error {shown.error:.2g} in {shown.format}"
            text += f", median layer {sorted(every)[len(every) // 2]:.2g}"
            if row.overflowed:
                text += f", {row.overflowed:.2g} of its results overflow"
            if row.flushed > _FLUSHED:
                text += f", {row.flushed:.2g} of its gradients flushed to 0"
            parts.append(text)
        return "; ".join(parts)

    def toml(self) -> str:
        """The policy file, with a line of evidence for each exception."""
        half = self.base in (HALF, "fp32")
        name = {KEPT: REFERENCES[KEPT], HALF: "fp16-mixed"}.get(self.base, self.base)
        low = any(form in SCHEMES for form in self.formats.values())
        lines = [f"# {self.verdict}", f'base = "{name}"']
        if low:
            lines.append("simulate = true  # where the device does not multiply these formats")
        if self.exceptions and not (half and self.base == "fp32"):
            lines.append("\n[rules]")
            for layer, forms in self.exceptions.items():
                lines.append(f"# {self.evidence(layer)}")
                same = len(set(forms)) == 1
                table = ", ".join(f'{p} = "{f}"' for p, f in zip(PRODUCTS, forms, strict=True))
                lines.append(f'"{layer}" = ' + (f'"{forms[0]}"' if same else f"{{{table}}}"))
        return "\n".join(lines) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the policy file, which ``--precision`` and ``Precision`` read."""
        Path(path).write_text(self.toml(), encoding="utf-8")

    def __str__(self) -> str:
        lines = [self.verdict]
        for layer, forms in self.exceptions.items():
            lines.append(f"  {layer}: {'/'.join(dict.fromkeys(forms))} ({self.evidence(layer)})")
        return Text("\n".join(lines))


def advise(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn,
    formats: Sequence[str] = ("bf16", "mxfp8", "nvfp4"),
    tolerance: float = 0.003,
    *,
    device: str = "b200",
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
    proof from short runs of the chosen policy beside the reference. Where a proof fails, less error
    is allowed and the next choice tried.

    Args:
        model: Plain, on its device, with weights worth measuring: errors of a model that was just
            initialised are others than later ones. It is not changed.
        batches: What ``loss_fn`` takes; at least one.
        loss_fn: From model and batch to the mean loss, a scalar; a function of these and of torch's
            random numbers alone.
        formats: The reference first: ``"bf16"`` with recipes such as ``"mxfp8"`` and ``"nvfp4"``,
            or ``"fp32"`` with ``"fp16"``, which answers which modules keep fp32.
        tolerance: How much higher the loss may be, relative: 0.003 for 0.3 %.
        device: Whose peak rates count: ``"b200"``, ``"h200"`` or ``"h100"``.
        steps: Optimizer steps of each run of the proof; 0 leaves the proof out.
        seeds: One pair of runs for each; at least two.
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
    linear_layers(model)  # refused here where there is none
    rates = rates_of(device)
    say(f"measuring {len(formats) - 1} formats")
    found = sensitivities(model, batches[:measured_on], loss_fn, formats)
    chooser = _Chooser(found, formats, {form: rates.get(form, 1.0) for form in formats})
    trials = Trials(
        model, batches, loss_fn, optimizer or _adamw, REFERENCES[formats[0]], steps, seeds, until
    )
    search = _Search(chooser, trials, tolerance, say)
    limit = math.inf if max_error is None else max_error
    chosen, gap, floor, reason = search.run(limit, once=max_error is not None)
    proved = gap is not None and gap.bound <= tolerance
    saved = chooser.saved(chosen)
    verdict = (
        f"{'proved' if proved else 'unproved'}: {saved:.0%} less time in linear layers on {device} "
        f"(peak rates), {reason}"
    )
    return Advice(
        chosen, policy_of(chosen, formats[0]), tuple(found), chooser.error(chosen), saved, device,
        gap, floor, tolerance, proved, verdict,
    )  # fmt: skip


def _kind(row: Sensitivity) -> Key:
    return row.product, row.format


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
    if not tolerance > 0:
        raise PrecisionError(f"tolerance={tolerance}; allowed: above 0, such as 0.003 for 0.3 %")
    if steps < 0 or (0 < steps < 4) or len(seeds) < 2 or not len(batches):
        raise PrecisionError(
            f"steps={steps}, {len(seeds)} seeds, {len(batches)} batches; allowed: 4 steps or more, "
            "or 0 for no proof, with 2 seeds or more and at least one batch"
        )


class _Chooser:
    """The knapsack of a model's layers; fp16 and fp32 are chosen for whole layers."""

    def __init__(
        self, found: Sequence[Sensitivity], formats: Sequence[str], rates: dict[str, float]
    ) -> None:
        self.by_key: dict[Key, dict[str, Sensitivity]] = {}
        for row in found:
            self.by_key.setdefault((row.layer, row.product), {})[row.format] = row
        self.reference, self.rates = formats[0], rates
        self.items: dict[str, list[Key]] = {}
        for key in self.by_key:
            together = key[0] if self.reference == "fp32" else "/".join(key)
            self.items.setdefault(together, []).append(key)

    def choose(self, limit: float) -> dict[Key, str]:
        """The cheapest formats up to an error; the reference where nothing else is below it."""
        options = [
            [
                Option(
                    form,
                    sum(self.by_key[key][form].flops for key in keys) / rate,
                    sum(self.by_key[key][form].error for key in keys),
                )
                for form, rate in self.rates.items()
                if all(form in self.by_key[key] for key in keys)
            ]
            for keys in self.items.values()
        ]
        picked = cheapest(options, limit)
        assert picked is not None  # the reference has no error
        pairs = zip(self.items.values(), picked, strict=True)
        return {key: option.format for keys, option in pairs for key in keys}

    def error(self, chosen: Formats) -> float:
        return sum(self.by_key[key][form].error for key, form in chosen.items())

    def saved(self, chosen: Formats) -> float:
        flops = {key: rows[self.reference].flops for key, rows in self.by_key.items()}
        rates = self.rates
        took = sum(flops[key] / rates[form] for key, form in chosen.items())
        return 1 - took * rates[self.reference] / sum(flops.values())


@dataclass
class _Search:
    """Tries choices, cheapest first, until one is proved or the time is over."""

    chooser: _Chooser
    trials: Trials
    tolerance: float
    say: Callable[[str], None]

    def run(
        self, limit: float, *, once: bool
    ) -> tuple[dict[Key, str], Gap | None, float | None, str]:
        """The last choice, its gap, the floor, and a clause about both."""
        chosen, gap, floor = self.chooser.choose(limit), None, None
        if not self.trials.steps:
            return chosen, None, None, "for no run was made"
        runs = f"{len(self.trials.seeds)} seeds of {self.trials.steps} steps"
        try:
            floor = self.trials.floor()
            if self.tolerance < floor:
                raise PrecisionError(
                    f"tolerance {self.tolerance:.3%} lies under the noise floor of {runs}, "
                    f"{floor:.3%}: nothing could be proved. Take more steps or seeds, or a higher "
                    "tolerance"
                )
            while True:
                self.say(f"proving {self.chooser.saved(chosen):.0%} less time")
                policy = policy_of(chosen, self.chooser.reference)
                parse_policy(policy)
                gap = self.trials.gap(policy)
                shown = f"loss {gap.mean:+.3%}, at 95 % at most {gap.bound:+.3%}, over {runs}"
                if gap.bound <= self.tolerance or once:
                    return chosen, gap, floor, shown
                tried, gap = chosen, None
                limit = min(limit, self.chooser.error(tried))
                while chosen == tried:
                    limit = limit * _TIGHTER if limit > 1e-9 else 0.0
                    chosen = self.chooser.choose(limit)
        except OutOfTime:
            return chosen, None, floor, f"for the time ended before {runs} of it were over"
