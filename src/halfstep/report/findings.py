"""Rules that find in a run's record what its user should know, worst first, with what to do.

Each rule is one function of :data:`RULES`; its words are in words.py, under its findings' names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from halfstep.diagnostics.statistics.what_if import what_if
from halfstep.report.record import RunRecord, number
from halfstep.report.words import phrase

Level = Literal["fault", "warning", "note"]
ORDER: Sequence[Level] = ("fault", "warning", "note")

SKIPS = 0.01
"""Share of skipped steps from which a dynamic scale is not what is wrong: with torch's growth every
2,000 steps a healthy run skips one in 2,000. **Source:** Micikevicius et al. 2018, section 3.2."""
LOST = 0.1
"""Share of lost updates from which on training suffers visibly: docs/diagnostics.md."""
FLUSHED = 0.01
"""Share of nonzero gradients that fp16 may round to zero unnoticed."""
HEADROOM = 65504 / 4
RISE = 1.2
"""Factor over its best smoothed value at which a loss counts as diverged."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """Something that happened, by the name of its words, with the values to put in."""

    level: Level
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, language: str) -> str:
        """The sentence."""
        return phrase(self.name, language, self.values)

    def remedy(self, language: str) -> str:
        """What to do about it."""
        return phrase(f"{self.name}!", language, self.values)


def findings(run: RunRecord) -> list[RunFinding]:
    """What a run's user should know, worst first."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


def verdict(run: RunRecord, language: str = "en") -> str:
    """The run in one line: healthy, or the worst finding; with skips and lost updates."""
    if not run.steps:
        return phrase("no_steps", language)
    counts = {"skipped": f"{len(run.skipped):,}", "steps": f"{len(run.steps):,}"}
    worst = next((f for f in findings(run) if f.level != "note"), None)
    if worst is not None:
        return phrase("trouble", language, {**counts, "worst": worst.text(language)})
    shares = [values[-1] for _, values in run.groups("lost_updates").values()]
    if not shares:
        return phrase("healthy_unmeasured", language, counts)
    return phrase("healthy", language, {**counts, "lost": f"{fmean(shares):.1%}"})


# --- rules ----------------------------------------------------------------------------------------


def _ended(run: RunRecord) -> Iterator[RunFinding]:
    if not run.steps:
        return
    last, planned = run.steps[-1], run.planned_steps
    step = last["step"]
    if last.get("applied") is False and (planned is None or step < planned):
        yield RunFinding("fault", "stopped_nonfinite", {"step": step})
    elif planned is not None and step < planned:
        yield RunFinding("note", "unfinished", {"step": step, "planned": planned, "name": run.name})


def _diverged(run: RunRecord) -> Iterator[RunFinding]:
    """A loss whose last twentieth is above its best by a fifth, and by more than its own noise."""
    steps, losses = run.series("loss")
    width = max(5, len(losses) // 20)
    if len(losses) < 4 * width:
        return
    # windows that overlap by nine tenths: one at each step would take hours of a million of them
    last_start = len(losses) - width
    starts = [*range(0, last_start, max(1, width // 10)), last_start]
    smooth = [median(losses[i : i + width]) for i in starts]
    finite = [(value, i) for value, i in zip(smooth, starts, strict=True) if math.isfinite(value)]
    if not finite:
        return
    best, at = min(finite)
    spread = median(abs(v - best) for v in losses[at : at + width])
    last = smooth[-1]
    if not last <= max(best * RISE if best > 0 else best, best + 6 * spread):
        values = {"best": f"{best:.4g}", "last": f"{last:.4g}", "step": steps[at]}
        yield RunFinding("fault", "diverged", values)


def _skips(run: RunRecord) -> Iterator[RunFinding]:
    counted = [line for line in run.steps if not line.get("calibrating")]
    skipped = sum(line.get("applied") is False for line in counted)
    if len(counted) >= 20 and skipped > max(2, SKIPS * len(counted)):
        yield RunFinding("warning", "many_skips", {"share": f"{skipped / len(counted):.1%}"})


def _scale(run: RunRecord) -> Iterator[RunFinding]:
    """A dynamic scale that ends eight times below what it held before, after calibration."""
    held = [
        scale
        for line in run.steps
        if not line.get("calibrating") and (scale := number(line.get("loss_scale"))) is not None
    ]
    if len(held) < 20:
        return
    before, last = max(held[: len(held) // 2]), max(held[-max(5, len(held) // 10) :])
    if last <= before / 8:
        yield RunFinding("warning", "scale_fell", {"high": f"{before:g}", "low": f"{last:g}"})


def _lost(run: RunRecord) -> Iterator[RunFinding]:
    shares = {group: values[-1] for group, (_, values) in run.groups("lost_updates").items()}
    for group, share in sorted(shares.items(), key=lambda item: -item[1])[:3]:
        if share > LOST:
            yield RunFinding("warning", "lost_updates", {"group": group, "share": f"{share:.0%}"})


def _back(run: RunRecord) -> Iterator[RunFinding]:
    count = sum(line.get("rolled_back") is True for line in run.steps)
    if count:
        yield RunFinding("warning", "rolled_back", {"count": count})


def _underflow(run: RunRecord) -> Iterator[RunFinding]:
    """fp16 gradients that the loss scale in force did not save, in the last watched step."""
    step = run.numerics[-1] if run.numerics else None
    if step is None or not step.policy.startswith("fp16") or not 0 < step.loss_scale < math.inf:
        return
    k = round(math.log2(step.loss_scale))
    found = [(what_if(t, "fp16", k).flushed, t.name) for t in step.in_16_bits() if t.nonzero]
    share, name = max(found, default=(0.0, ""))
    if share > FLUSHED:
        yield RunFinding("warning", "fp16_underflow", {"share": f"{share:.1%}", "tensor": name})


def _headroom(run: RunRecord) -> Iterator[RunFinding]:
    """Outputs of modules near the end of fp16, in any watched step."""
    outputs = [
        tensor
        for step in run.numerics
        if step.policy.startswith("fp16")
        for tensor in step.of("activation")
    ]
    most = max(outputs, key=lambda tensor: tensor.absmax, default=None)
    if most is not None and most.absmax > HEADROOM:
        values = {"tensor": most.name, "largest": f"{most.absmax:,.0f}"}
        yield RunFinding("warning", "fp16_headroom", values)


def _spikes(run: RunRecord) -> Iterator[RunFinding]:
    if run.excluded:
        yield RunFinding("note", "spikes", {"count": len(run.excluded)})


RULES: Sequence[Callable[[RunRecord], Iterator[RunFinding]]] = (
    _ended,
    _diverged,
    _skips,
    _scale,
    _lost,
    _back,
    _underflow,
    _headroom,
    _spikes,
)
