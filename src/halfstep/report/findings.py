"""Rules that find in a run's record what its user should know, worst first, with what to do.

Each rule is one function of :data:`RULES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from statistics import fmean, median
from typing import Any, Literal

import torch

from halfstep.diagnostics.health import WORDS
from halfstep.diagnostics.lost_updates import LOUD
from halfstep.report import N_, gettext
from halfstep.report.record import BROKEN, RunRecord
from halfstep.shown import typed

Level = Literal["fault", "warning", "note"]
ORDER: Sequence[Level] = ("fault", "warning", "note")

COMMANDS = {"pretrain": "train", "classify": "finetune classify", "lm": "finetune lm"}
"""A run's task to the command that goes on with it; other runs belong to programs."""
SKIPS = 0.01
"""Share of skipped steps from which a dynamic scale is not what is wrong: with torch's growth every
2,000 steps a healthy run skips one in 2,000. **Source:** Micikevicius et al. 2018, section 3.2."""
FEW = 20
"""Steps below which a run tells nothing of its health."""
RISE = 0.2
"""Share of its best value, and of what it had fallen, by which a loss that diverged rose."""
ENOUGH = 200
"""Steps below which a model that is still near a guess is called short of steps, not wrong."""
WORSE = 1.05
"""Factor over another from which on a loss is called worse."""
WIDER = N_("; or train in bf16-mixed, whose range is that of fp32")
"""How a remedy for fp16 ends."""
LEARNED = ("rose", "worsened", "guessing")
"""The names of findings about what was learned; the others are about the numbers."""
UNSURE = N_(
    "See whether the targets follow from the inputs; the losses do not tell whether another "
    "learning rate helps."
)
BY_HEART = N_(
    "The training loss fell meanwhile, so what it learns does not hold for the validation data: "
    "give more data, take fewer steps, or set more dropout or weight decay."
)


@dataclass(frozen=True, slots=True)
class RunFinding:
    """Something that happened, and what to do about it.

    Attributes:
        level: How bad it is.
        name: Its name in JSON.
        what: The sentence in English, with names in braces.
        do: What to do about it, likewise.
        values: What takes the names' places.
        command: What to type for that, or empty.
    """

    level: Level
    name: str
    what: str
    do: str
    values: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def text(self, language: str) -> str:
        """The sentence."""
        return gettext(self.what, language).format(**self._in(language))

    def remedy(self, language: str) -> str:
        """What to do about it."""
        return gettext(self.do, language).format(**self._in(language))

    def _in(self, language: str) -> Mapping[str, Any]:
        keys = {"cause_class", "remedy", "quantity"} & self.values.keys()
        return {**self.values, **{k: translated(str(self.values[k]), language) for k in keys}}


def translated(text: str, language: str) -> str:
    """A class of causes, a quantity or a remedy; of one that holds figures, all but these."""
    rose = N_("lower the learning rate: the loss rose from {0} at step {1} to {2} at step {3}")
    body, wider, _ = text.partition(WIDER)
    said = gettext(body, language)
    if said == body and (figures := re.fullmatch(re.sub(r"{\d}", r"(\\S+)", rose), body)):
        said = gettext(rose, language).format(*figures.groups())
    elif said == body:
        parts = re.split("(: | is up to )", body)
        said = "".join(gettext(part, language) for part in parts if part)
    return said + (gettext(wider, language) if wider else "")


def findings(run: RunRecord) -> list[RunFinding]:
    """What a run's user should know, worst first.

    What it learned is judged where it took its steps and nothing is wrong with its numbers.
    """
    found = [finding for rule in RULES for finding in rule(run)]
    if run.steps and all(f.level == "note" and f.name != "unfinished" for f in found):
        worse = _worsened(run)
        guess = _guessing(run) if not worse or worse.level == "note" or run.scores else None
        found += filter(None, [guess, worse])
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


def verdict(run: RunRecord, language: str = "en") -> str:
    """The run in a line: its numerics, then what it learned; in another line what to type."""
    if not run.steps:
        return gettext("the run took no step", language)
    found = findings(run)
    worst = next((f for f in found if f.level != "note" and f.name not in LEARNED), None)
    text = _numerics(run, worst, language)
    learned = (f for f in found if f.level != "note" and f.name in LEARNED)
    also = next(learned, next((f for f in found if f.name == "unfinished"), None))
    if also is not None:
        said = gettext("{said}. {also}", language)
        text = said.format(said=text, also=also.text(language))
    asked = [f for f in found if f.level == "fault" or f in (worst, also)]
    commands = [f"try: {f.command}" for f in asked if f.command]
    return "\n".join([text, *commands[:1]])


def _numerics(run: RunRecord, worst: RunFinding | None, language: str) -> str:
    """What happened to the numbers: the worst that was found, or skips and lost updates."""
    counts = {"skipped": f"{len(run.skipped):,}", "steps": f"{len(run.steps):,}"}
    if worst is not None:
        text = gettext("{worst} ({skipped} of {steps} steps skipped)", language)
        return text.format(**counts, worst=worst.text(language))
    shares = [*run.lost_shares.values()]
    if len(run.steps) < FEW:
        text = gettext("too short to judge: {skipped} of {steps} steps skipped", language)
    elif run.parsed.param_dtype == torch.float32 or max(shares, default=0.0) > LOUD:
        # no format keeps more than fp32 weights, or than the fp32 masters that may be left here
        text = gettext("numerics: ok: {skipped} of {steps} steps skipped", language)
    elif shares:
        text = gettext(
            "numerics: ok: {skipped} of {steps} steps skipped, {lost} of updates lost", language
        )
        counts["lost"] = f"{fmean(shares):.1%}"
    else:
        text = gettext(
            "numerics: ok: {skipped} of {steps} steps skipped; lost updates were not measured",
            language,
        )
    return text.format(**counts)


# --- rules ----------------------------------------------------------------------------------------


def _ended(run: RunRecord) -> Iterator[RunFinding]:
    step, planned = run.steps[-1]["step"] if run.steps else 0, run.planned_steps
    kind = run.stopped
    if kind == "spike":
        yield RunFinding(
            "fault",
            "stopped_spike",
            N_("Step {step} spiked, and the run stopped there, as on_spike asks"),
            N_('To go on without its batch, set on_spike="skip:10".'),
            {"step": step},
            _typed(run, True, on_spike="skip:10"),
        )
    elif kind in BROKEN:
        yield _not_finite(run, step)
    elif planned is not None and 0 < step < planned:
        yield RunFinding(
            "note",
            "unfinished",
            N_("The run ended at step {step} of {planned}"),
            N_("A resume goes on from the last checkpoint."),
            {"step": step, "planned": planned},
            _typed(run, True),
        )


def _not_finite(run: RunRecord, step: int) -> RunFinding:
    cause = next((c for c in run.causes if c.get("step") == step), {})
    known = {k: cause.get(k) for k in ("cause_class", "remedy", "module", "op")}
    if all(isinstance(value, str) for value in known.values()):
        place = f"{known['module']} ({known['op']})" if known["module"] else known["op"]
        return RunFinding(
            "fault",
            "stopped_by_cause",
            N_("Step {step} was not finite, and the run ended there: {cause_class}, in {place}"),
            N_("To do: {remedy}."),
            {"step": step, "place": place, **known},
            _at_rate(run, 1 / 3) if cause.get("slower") else "",
        )
    searched = N_("No first cause was found.")
    if "task" not in run.config:  # a loop of the user's own, which searches when it is told to
        searched = N_(
            "No first cause was searched: halfstep.first_cause(precision, your_loss, batch) does."
        )
    return RunFinding(
        "fault",
        "stopped_nonfinite",
        N_("Step {step} was not finite, and the run ended there"),
        searched,
        {"step": step},
    )


def _typed(run: RunRecord, resume: bool, **changes: object) -> str:
    """What to type to go on with a run, or to train it anew; empty for a loop of the user's own."""
    task, table = run.config.get("task"), run.config.get("run")
    if task not in (*COMMANDS, "module"):
        return ""
    section = (table if isinstance(table, dict) else {}) | {"output_dir": _folder(run)}
    return typed(COMMANDS.get(task, ""), section, changes, resume=resume)


def _at_rate(run: RunRecord, factor: float) -> str:
    """What to type to train anew at another learning rate; empty where none was recorded."""
    rates = [*filter(math.isfinite, run.series("learning_rate")[1])]
    broken = rates and run.stopped in BROKEN  # then it is what the run's own error says
    rate = rates[-1] / 10 if broken else max(rates, default=0.0) * factor
    return _typed(run, False, learning_rate=f"{rate:.1g}") if rate else ""


def _folder(run: RunRecord) -> str:
    table = run.config.get("run")
    return str((table.get("output_dir") if isinstance(table, dict) else "") or run.name)


def _diverged(run: RunRecord) -> Iterator[RunFinding]:
    """A loss that ended far above its best.

    The trainer's own tasks have one loss, of data in a random order. Another may rise by design: a
    GAN's, that of growing returns or of harder data. Its gradients or its end tell then.
    """
    steps, losses = run.applied.series("loss")
    certain = run.config.get("task") in COMMANDS or _grew(run)
    found = _rose(losses, RISE if certain else 1 / 3)
    if found:
        low, last = found
        certain = certain or not math.isfinite(last)
        yield RunFinding(
            "fault" if certain else "warning",
            "diverged" if certain else "rose",
            N_("The loss rose from {best} at step {step} to {last}, and did not come back"),
            N_("Lower the learning rate, or lengthen its warm-up.")
            if certain
            else N_("If this loss is meant to fall, on data of one kind, lower the learning rate."),
            {"best": f"{losses[low]:.4g}", "last": f"{last:.4g}", "step": steps[low]},
            _at_rate(run, 1 / 3) if certain else "",
        )


def _grew(run: RunRecord) -> bool:
    """Whether losses and gradients ended at 100 times all that they were at the start."""
    both = [run.applied.series(key)[1] for key in ("loss", "grad_norm")]
    return all(v and median(v[-5:]) > 100 * max(map(abs, v[:5])) for v in both)


def _rose(losses: Sequence[float], share: float) -> tuple[int, float] | None:
    """The index of the best loss, and the median of the last twentieth where it rose from there.

    It did by a share of what it had fallen and beyond its noise, and is not falling again.
    """
    width = max(5, len(losses) // 20)
    known = [loss if math.isfinite(loss) else math.inf for loss in losses]
    cuts = range(len(losses) % width, len(losses), width)
    windows = [median(known[i : i + width]) for i in cuts]
    if len(windows) < 4 or min(windows) == math.inf:
        return None
    best, last, start = min(windows), windows[-1], median(known[:5])
    first = cuts[windows.index(best)]
    near = known[first : first + width]
    low = first + near.index(min(near))
    if last == math.inf:
        return low, losses[-1]
    noise = median(abs(loss - best) for loss in near)
    least = best + max(share * (start - best), RISE * abs(best), 6 * noise)
    peak = max(range(len(windows)), key=lambda i: (cuts[i] > first, windows[i]))
    between = windows[(peak + len(windows) - 1) // 2]
    back = last < start and between - last > (between - best) / 4
    return (low, last) if last > least and not back else None


def _layer(run: RunRecord) -> Iterator[RunFinding]:
    """The first layer that left its own past."""
    alarms = [a for line in run.health for a in line.get("alarms") or () if isinstance(a, dict)]
    first = next(iter(alarms), {})
    quantity, times, since = (first.get(key) for key in ("quantity", "times", "since"))
    if quantity not in WORDS or not isinstance(times, float) or not isinstance(since, int):
        return
    values = {"layer": first.get("layer") or "the model", "quantity": WORDS[quantity]}
    values |= {"times": f"{times:.3g}", "since": f"{since:,}"}
    yield RunFinding(
        "warning",
        "layer_health",
        N_("{layer}: {quantity} {times} times its median since step {since}"),
        N_(
            "Go back to a checkpoint from before it, with a lower learning rate for that layer or "
            "max_norm; health.jsonl has the numbers of all layers."
        ),
        values,
    )


def _skips(run: RunRecord) -> Iterator[RunFinding]:
    """Overflows beyond those by which a growing scale finds its limit: one in a growth interval."""
    config = run.parsed.loss_scale
    counted = sum(not line.get("calibrating") for line in run.steps)
    skipped = sum(event.kind == "overflow" for event in run.events)
    most = max(2, max(SKIPS, 2 / config.growth_interval) * counted)
    if config.kind == "dynamic" and counted >= FEW and skipped > most:
        yield RunFinding(
            "warning",
            "many_skips",
            N_("Gradients that were not finite skipped {share} of the steps after calibration"),
            N_(
                "That is more than a growing loss scale explains. If they are finite in "
                "bf16-mixed, whose range is that of fp32, train in it."
            ),
            {"share": f"{skipped / counted:.1%}"},
        )


def _left_out(run: RunRecord) -> Iterator[RunFinding]:
    """Steps that were not finite, which no loss scale cures, and the run was told to survive."""
    kinds = ("nonfinite",) if run.parsed.loss_scale.kind == "dynamic" else BROKEN
    told = [line["step"] for line in run.skipped if line.get("skip_reason")]
    steps = [event.step for event in run.events if event.kind in kinds and event.step in told]
    steps = steps[:-1] if run.stopped in kinds else steps
    if steps:
        yield RunFinding(
            "warning",
            "left_out",
            N_("Steps that were not finite, left out: {count}; the first is step {step}"),
            N_("No loss scale cures these. The table of skipped steps has the causes found."),
            {"count": len(steps), "step": steps[0]},
        )


def _lost(run: RunRecord) -> Iterator[RunFinding]:
    """Updates that a wider format would have kept: no format keeps more than an fp32 master."""
    policy = run.parsed
    if policy.master_dtype == torch.float32:
        return
    fp16 = policy.compute_dtype == torch.float16
    exact, wide = ("fp16-master", "fp16-mixed") if fp16 else ("bf16-split", "bf16-mixed")
    for group, share in sorted(run.lost_shares.items(), key=lambda item: -item[1])[:3]:
        if share > LOUD:
            yield RunFinding(
                "warning",
                "lost_updates",
                N_("{share} of the updates of {group} were lost to rounding"),
                N_(
                    "Train in {exact} (16-bit weights with an exact fp32 master) or {wide} (fp32 "
                    "weights)."
                ),
                {"group": group, "share": f"{share:.0%}", "exact": exact, "wide": wide},
                _typed(run, False, precision=exact),
            )


def _unscored(run: RunRecord) -> Iterator[RunFinding]:
    """Outputs that were not finite in the last evaluation, of which training steps know nothing."""
    steps, found = run.series("val_loss")
    if found and not math.isfinite(found[-1]):
        low = run.parsed.compute_dtype != torch.float32 and run.config.get("task") in COMMANDS
        yield RunFinding(
            "fault",
            "unscored",
            N_("The validation loss is {loss} at step {step}"),
            N_("Look for the validation example whose loss is not finite."),
            {"loss": found[-1], "step": steps[-1]},
            f"halfstep evaluate --run {quote(_folder(run))} --precision fp32" if low else "",
        )


def _worsened(run: RunRecord) -> RunFinding | None:
    """A validation loss above its best: overfitting where the training loss fell meanwhile.

    Where a classifier is as often right as then, only its probabilities are too sure: a note.
    """
    steps, found = run.series("val_loss")
    best = min(range(len(found)), key=lambda i: (not math.isfinite(found[i]), found[i]), default=0)
    losses = run.series("loss")[1]
    if not losses or best >= len(found) - 1:
        return None
    start = max(filter(math.isfinite, [found[0], *losses[:5]]))
    least = found[best] + (WORSE - 1) * max(abs(found[best]), start - found[best])
    by_step = dict(zip(*run.series("loss"), strict=True))
    then, now = (
        median(
            by_step.get(at - i, math.nan) for i in range(max(5, min(20, steps[-1] - steps[best])))
        )
        for at in (steps[best], steps[-1])
    )
    fell = _above(then, now)
    if found[-1] <= least or not (fell or found[-2] > least):  # or one of a noisy curve
        return None
    right = dict(zip(*run.series("val_accuracy"), strict=True))
    sure = right.get(steps[-1], -1.0) >= right.get(steps[best], 0.0)
    do, command = BY_HEART, _typed(run, False, max_steps=steps[best])
    if not fell:
        do, command = UNSURE, ""
    return RunFinding(
        "note" if sure else "warning",
        "worsened",
        N_("The validation loss rose from {best} at step {step} to {last}"),
        do,
        {"best": f"{found[best]:.4g}", "last": f"{found[-1]:.4g}", "step": steps[best]},
        command,
    )


def _above(loss: float, other: float) -> bool:
    return loss > other + (WORSE - 1) * abs(other)


def _guessing(run: RunRecord) -> RunFinding | None:
    """A model that is no better than knowing nothing, or hardly so after few steps.

    Known are the loss of a uniform guess over a vocabulary, and that a classifier's labels can be
    had by always answering one.
    """
    count, losses, checked = len(run.steps), run.series("loss")[1], run.series("val_loss")[1]
    found = (_classified if run.scores else _at_start)(run, few=count < ENOUGH)
    if found is None:
        return None
    what, values = found
    do, command = UNSURE, ""
    last = median(losses[-max(5, count // 20) :] or [math.inf])
    if checked and losses and _above(min(losses[0], 0.8 * checked[-1]), last):
        do, command = BY_HEART, _typed(run, False, max_steps=max(1, count // 2))
    elif count < ENOUGH:
        do = N_("{steps} steps are few to learn from: train for {more}.")
        values |= {"steps": count, "more": max(300, 2 * count)}
        command = _typed(run, True, max_steps=values["more"])
    return RunFinding("warning", "guessing", what, do, values, command)


def _classified(run: RunRecord, few: bool) -> tuple[str, dict[str, Any]] | None:
    """What is wrong with the best state's answers: one class for all, or as good as drawn."""
    rows, labels = run.scores["confusion"], run.scores["labels"]
    answers, sizes = [*map(sum, zip(*rows, strict=True))], [*map(sum, rows)]
    top, total = max(range(len(rows)), key=answers.__getitem__), sum(sizes)
    others = total - sizes[top]
    values = {"label": labels[top], "count": f"{total:,}", "others": f"{others:,}"}
    if others >= 5 and total - answers[top] <= others / 10:
        said = N_(
            "The classifier answers {label} for {answers} of {count} validation examples, {others} "
            "of which have another label"
        )
        return said, values | {"answers": f"{answers[top]:,}"}
    hits = [row[i] for i, row in enumerate(rows)]
    recalls = [hit / size for hit, size in zip(hits, sizes, strict=True) if size]
    chance = 1 / len(recalls)
    near = fmean(recalls) - chance <= (0.25 if few else 0.05) * (1 - chance)
    if not near or total - max(sizes) < 5:
        return None
    said = N_(
        "The classifier is right for {right} of {count} validation examples, of which {most} "
        "have one label"
    )
    shares = {"right": f"{sum(hits) / total:.1%}", "most": f"{max(sizes) / total:.1%}"}
    return said, values | shares


def _at_start(run: RunRecord, few: bool) -> tuple[str, dict[str, Any]] | None:
    """Whether the last validation loss of a text model is that of a guess among its tokens."""
    found, model = run.series("val_loss")[1], run.config.get("model")
    text = run.config.get("task") == "pretrain"
    size = model.get("vocab_size") if text and isinstance(model, dict) else None
    if not found or len(run.steps) < FEW or not isinstance(size, int) or size < 2:
        return None
    guess = math.log(size)
    said = N_("The validation loss is {loss}; a guess among {count} tokens has {guess}")
    values = {"loss": f"{found[-1]:.4g}", "guess": f"{guess:.4g}", "count": f"{size:,}"}
    return (said, values) if found[-1] >= guess * (0.9 if few else 1.0) else None


def _damaged(run: RunRecord) -> Iterator[RunFinding]:
    for file, count in run.damaged.items():
        yield RunFinding(
            "note",
            "damaged",
            N_("Lines of {file} that could not be read: {count}"),
            N_(
                "A process that is killed may leave its last line unfinished; a resume writes it "
                "anew."
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
    _unscored,
    _damaged,
)
