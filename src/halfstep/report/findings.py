"""Rules that find in a run's record what its user should know, worst first, with what to do.

Each rule is one function of :data:`RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from statistics import fmean, median
from typing import Any, Literal

import torch

import halfstep.diagnostics.statistics as statistics
from halfstep.diagnostics.lost_updates import LOUD, lost_share
from halfstep.report import N_, gettext
from halfstep.report.record import RunRecord, parsed

Level = Literal["fault", "warning", "note"]
ORDER: Sequence[Level] = ("fault", "warning", "note")

COMMANDS = {"pretrain": "train", "classify": "finetune classify", "lm": "finetune lm"}
"""A run's task to the command that goes on with it; other runs belong to programs."""
SKIPS = 0.01
"""Share of skipped steps from which a dynamic scale is not what is wrong: with torch's growth every
2,000 steps a healthy run skips one in 2,000. **Source:** Micikevicius et al. 2018, section 3.2."""
FLUSHED = 0.01
"""Share of nonzero gradients that fp16 may round to zero unnoticed."""
HEADROOM = 65504 / 4
FEW = 20
"""Steps below which a run tells nothing of its health."""
RISE = 1.2
"""Factor over its best smoothed value at which a loss counts as diverged."""


WORDS = {
    "weight": N_("largest weight"),
    "update": N_("update to weight ratio"),
    "gradient": N_("gradient norm"),
    "activation": N_("largest output"),
    "logit": N_("largest attention logit"),
}
"""What layer health measures."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """Something that happened, and what to do about it.

    Attributes:
        level: How bad it is.
        name: Its name in JSON.
        what: The sentence in English, with names in braces.
        do: What to do about it, likewise.
        values: What takes the names' places.
    """

    level: Level
    name: str
    what: str
    do: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, language: str) -> str:
        """The sentence."""
        return gettext(self.what, language).format(**self._in(language))

    def remedy(self, language: str) -> str:
        """What to do about it."""
        return gettext(self.do, language).format(**self._in(language))

    def _in(self, language: str) -> Mapping[str, Any]:
        keys = {"cause_class", "remedy", "quantity"} & self.values.keys()
        return {**self.values, **{k: gettext(str(self.values[k]), language) for k in keys}}


def findings(run: RunRecord) -> list[RunFinding]:
    """What a run's user should know, worst first."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


def verdict(run: RunRecord, language: str = "en") -> str:
    """The run in one line: healthy, or the worst finding; with skips and lost updates."""
    if not run.steps:
        return gettext("the run took no step", language)
    counts = {"skipped": f"{len(run.skipped):,}", "steps": f"{len(run.steps):,}"}
    found = findings(run)
    worst = next((f for f in found if f.level != "note"), None)
    if worst is not None:
        return gettext("{worst} ({skipped} of {steps} steps skipped)", language).format(
            **counts, worst=worst.text(language)
        )
    shares = [*lost_shares(run).values()]
    if len(run.steps) < FEW:
        text = gettext("too short to judge: {skipped} of {steps} steps skipped", language)
    elif shares:
        text = gettext(
            "healthy: {skipped} of {steps} steps skipped, {lost} of updates lost", language
        )
        counts["lost"] = f"{fmean(shares):.1%}"
    else:
        text = gettext(
            "healthy: {skipped} of {steps} steps skipped; lost updates were not measured", language
        )
    said = text.format(**counts)
    ended = [f.text(language) for f in found if f.name == "unfinished"]
    return gettext("{said}. {also}", language).format(said=said, also=ended[0]) if ended else said


# --- rules ----------------------------------------------------------------------------------------


def _ended(run: RunRecord) -> Iterator[RunFinding]:
    if not run.steps:
        return
    last, planned = run.steps[-1], run.planned_steps
    step = last["step"]
    stopped = last.get("applied") is False and (planned is None or step < planned)
    kind = run.events[-1].kind if stopped else ""
    if kind == "spike":
        yield RunFinding(
            "fault",
            "stopped_spike",
            N_("Step {step} spiked, and the run stopped there, as run.on_spike asks"),
            N_(
                "To go on without its batch, set "
                'run.on_spike = "skip:10" (--on-spike skip:10): {resume}.'
            ),
            {"step": step, "resume": _resume(run)},
        )
    elif kind in ("nonfinite", "overflow"):
        yield _not_finite(run, step)
    elif planned is not None and step < planned:
        values = {"step": step, "planned": planned, "resume": _resume(run)}
        yield RunFinding(
            "note",
            "unfinished",
            N_("The run ended at step {step} of {planned}"),
            N_("To go on with it: {resume}."),
            values,
        )


def _not_finite(run: RunRecord, step: int) -> RunFinding:
    cause = next((c for c in run.causes if c.get("step") == step), {})
    known = {k: cause.get(k) for k in ("cause_class", "remedy", "module", "op")}
    if all(isinstance(value, str) for value in known.values()):
        place = f"{known['module']} ({known['op']})" if known["module"] else known["op"]
        values = {"step": step, "place": place, **known}
        return RunFinding(
            "fault",
            "stopped_by_cause",
            N_("Step {step} was not finite, and the run ended there: {cause_class}, in {place}"),
            N_("To do: {remedy}."),
            values,
        )
    return RunFinding(
        "fault",
        "stopped_nonfinite",
        N_("Step {step} was not finite, and the run ended there"),
        N_(
            "No first cause was found. Lower optimizer.learning_rate, or set "
            'optimizer.max_norm = 1.0; run.on_nonfinite = "skip:3" lets a run go on '
            "past such a step."
        ),
        {"step": step},
    )


def _resume(run: RunRecord) -> str:
    """What goes on with a run: a command, or the line of its program."""
    command = COMMANDS.get(str(run.config.get("task")))
    if command is None:
        return "Trainer.train(resume=True)"
    table = run.config.get("run")
    folder = table.get("output_dir") if isinstance(table, dict) else None
    name = folder if isinstance(folder, str) and folder else run.name
    return f"halfstep {command} --resume --output-dir {quote(name)}"


def _diverged(run: RunRecord) -> Iterator[RunFinding]:
    """A loss whose last twentieth is above its best by a fifth, and by more than its own noise."""
    steps, losses = run.series("loss")
    width = max(5, len(losses) // 20)
    if len(losses) < 4 * width:
        return
    windows = {i: median(losses[i : i + width]) for i in range(len(losses) - width, -1, -width)}
    finite = [i for i, value in windows.items() if math.isfinite(value)]
    if not finite:
        return
    at = min(finite, key=windows.__getitem__)
    best, last = windows[at], windows[len(losses) - width]
    spread = median(abs(v - best) for v in losses[at : at + width])
    most = max(best * RISE if best > 0 else best, best + 6 * spread)
    if not last <= most:  # a NaN too
        values = {"best": f"{best:.4g}", "last": f"{last:.4g}", "step": steps[at]}
        yield RunFinding(
            "fault",
            "diverged",
            N_("The loss rose from {best} at step {step} to {last}, and did not come back"),
            N_("Lower optimizer.learning_rate, or lengthen schedule.warmup_steps."),
            values,
        )


def _layer(run: RunRecord) -> Iterator[RunFinding]:
    """The first layer that left its own past, and where the loss rose after it."""
    alarms = [a for line in run.health for a in line.get("alarms") or () if isinstance(a, dict)]
    first = next(iter(alarms), {})
    quantity, times, since = (first.get(key) for key in ("quantity", "times", "since"))
    if quantity not in WORDS or not isinstance(times, float) or not isinstance(since, int):
        return
    values = {"layer": first.get("layer") or "the model", "quantity": WORDS[quantity]}
    values |= {"times": f"{times:.3g}", "since": f"{since:,}", "rise": f"{_rise(run, since):,}"}
    text = N_("{layer}: {quantity} {times} times its median since step {since}")
    if _rise(run, since):
        text = N_(
            "{layer}: {quantity} {times} times its median since step {since}; the loss rises at "
            "step {rise}"
        )
    yield RunFinding(
        "warning",
        "layer_health",
        text,
        N_(
            "Go back to a checkpoint from before it, with a lower learning rate for that layer or "
            "optimizer.max_norm; health.jsonl has the numbers of all layers."
        ),
        values,
    )


def _rise(run: RunRecord, since: int) -> int:
    """The first of five steps in a row, from ``since`` on, above all of the 50 before; or 0."""
    steps, losses = run.series("loss")
    before = [loss for step, loss in zip(steps, losses, strict=True) if step < since][-50:]
    after = [(s, v) for s, v in zip(steps, losses, strict=True) if s >= since]
    for i in range(len(after) - 4 if before else 0):
        if not min(value for _, value in after[i : i + 5]) <= max(before):
            return after[i][0]
    return 0


def _skips(run: RunRecord) -> Iterator[RunFinding]:
    """Overflows beyond those by which a growing scale finds its limit: one in a growth interval."""
    counted = sum(not line.get("calibrating") for line in run.steps)
    skipped = sum(event.kind == "overflow" for event in run.events)
    expected = 2 / run.parsed.loss_scale.growth_interval
    if counted >= FEW and skipped > max(2, max(SKIPS, expected) * counted):
        yield RunFinding(
            "warning",
            "many_skips",
            N_("{share} of the steps after calibration were skipped because gradients overflowed"),
            N_(
                "That is more than a growing loss scale explains, so values leave the format: set "
                'precision = "bf16-mixed", whose range is that of fp32.'
            ),
            {"share": f"{skipped / counted:.1%}"},
        )


def _left_out(run: RunRecord) -> Iterator[RunFinding]:
    """Steps without a finite loss that the run was told to survive."""
    steps = [event.step for event in run.events if event.kind == "nonfinite"]
    steps = [step for step in steps if step != run.steps[-1]["step"]]
    if steps:
        values = {"count": len(steps), "step": steps[0]}
        yield RunFinding(
            "warning",
            "left_out",
            N_("Steps without a finite loss, left out: {count}; the first is step {step}"),
            N_(
                "A loss scale does not cure these: the forward pass or the data made them. The "
                "table of skipped steps names the cause where it was found."
            ),
            values,
        )


def lost_shares(run: RunRecord) -> dict[str, float]:
    """The share of updates that each parameter group lost, where measured steps tell."""
    rates = dict(zip(*run.series("learning_rate"), strict=True))
    peak = max(filter(math.isfinite, rates.values()), default=math.nan)
    shares = {
        group: lost_share(zip((rates.get(s, math.nan) for s in steps), values, strict=True), peak)
        for group, (steps, values) in run.groups("lost_updates").items()
    }
    return {group: share for group, share in shares.items() if not math.isnan(share)}


def _lost(run: RunRecord) -> Iterator[RunFinding]:
    policy = run.parsed
    fp16 = policy.compute_dtype == torch.float16
    exact, wide = ("fp16-master", "fp16-mixed") if fp16 else ("bf16-split", "bf16-mixed")
    for group, share in sorted(lost_shares(run).items(), key=lambda item: -item[1])[:3]:
        values = {"group": group, "share": f"{share:.0%}", "exact": exact, "wide": wide}
        if share > LOUD and policy.master_dtype == torch.float32:
            yield RunFinding(
                "warning",
                "lost_in_fp32",
                N_(
                    "{share} of the updates of {group} were lost to rounding, although its weights "
                    "are kept in fp32"
                ),
                N_(
                    "No policy keeps more than fp32: if the loss does not fall either, raise "
                    "optimizer.learning_rate."
                ),
                values,
            )
        elif share > LOUD:
            yield RunFinding(
                "warning",
                "lost_updates",
                N_("{share} of the updates of {group} were lost to rounding"),
                N_(
                    'Set precision = "{exact}" (16-bit weights with an exact fp32 master) or '
                    '"{wide}" (fp32 weights).'
                ),
                values,
            )


def _underflow(run: RunRecord) -> Iterator[RunFinding]:
    """fp16 gradients that the loss scale in force did not save, in the last watched step."""
    step = run.numerics[-1] if run.numerics else None
    if step is None or not _in_fp16(step) or not 0 < step.loss_scale < math.inf:
        return
    k = round(math.log2(step.loss_scale))
    found = [(share, name) for name, share in step.flushed("fp16", k).items()]
    share, name = max(found, default=(0.0, ""))
    if share > FLUSHED:
        yield RunFinding(
            "warning",
            "fp16_underflow",
            N_("fp16 flushes {share} of {tensor} to 0 at the loss scale in force"),
            N_(
                'Set precision = "bf16-mixed", whose range is that of fp32; or a larger loss '
                "scale, where the table of the numbers names one that fits."
            ),
            {"share": f"{share:.1%}", "tensor": name},
        )


def _in_fp16(step: statistics.StepNumerics) -> bool:
    return parsed(step.policy).compute_dtype == torch.float16


def _headroom(run: RunRecord) -> Iterator[RunFinding]:
    """Outputs of modules near the end of fp16, in any watched step."""
    outputs = [t for step in run.numerics if _in_fp16(step) for t in step.of("activation")]
    most = max(outputs, key=lambda tensor: tensor.absmax, default=None)
    if most is not None and most.absmax > HEADROOM:
        yield RunFinding(
            "warning",
            "fp16_headroom",
            N_("{tensor} reaches {largest}, within a factor of four of fp16's 65,504"),
            N_(
                "Keep this module in fp32 by adding ,keep_fp32={module} to the precision; or set "
                'precision = "bf16-mixed".'
            ),
            {
                "tensor": most.name,
                "largest": f"{most.absmax:,.0f}",
                "module": most.name.partition("[")[0],
            },
        )


def _damaged(run: RunRecord) -> Iterator[RunFinding]:
    for file, count in run.damaged.items():
        yield RunFinding(
            "note",
            "damaged",
            N_("Lines of {file} that could not be read: {count}"),
            N_(
                "A process that is killed may leave its last line unfinished; halfstep train "
                "--resume writes it anew."
            ),
            {"count": count, "file": file},
        )


RULES: Sequence[Callable[[RunRecord], Iterator[RunFinding]]] = (
    _ended,
    _diverged,
    _layer,
    _left_out,
    _skips,
    _lost,
    _underflow,
    _headroom,
    _damaged,
)
