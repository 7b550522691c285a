"""Each rule on runs with one thing wrong, and none of them on healthy runs."""

import itertools
import json
import math
import random
import re
from dataclasses import replace

import pytest
import torch

from halfstep.diagnostics.nonfinite.cause import OF_OPERATION, REMEDIES, Operand, remedy_of
from halfstep.precision.scaling.gradients import Progress
from halfstep.precision.scaling.loss_scale import LossScaleConfig
from halfstep.report.findings import findings, translated, verdict
from halfstep.report.record import read_run
from report.conftest import STOP, line


def names(path):
    return [finding.name for finding in findings(read_run(path))]


def noisy(seed, count=300, floor=3.0, noise=0.3):
    """A loss that falls to a floor, with a batch's noise."""
    draw = random.Random(seed)
    return [floor + 4 * math.exp(-step / 40) + draw.gauss(0, noise) for step in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_healthy_runs_have_no_finding(folder, seed):
    draw = random.Random(100 + seed)
    lines, scale = [], 65536.0
    for step, loss in enumerate(noisy(seed, noise=0.05 * (seed + 1)), 1):
        calibrating = seed % 3 == 0 and step <= 6
        skipped = calibrating or (seed % 2 == 0 and step in (150, 151))
        scale = scale / 2 if skipped else scale
        extra = {"applied": not skipped, "loss_scale": scale, "calibrating": calibrating or None}
        lost = {"lost_updates": {"g": draw.random() * 0.02}} if step % 50 == 0 else {}
        lines.append(line(step, loss=loss, **extra, **lost))
    path = folder(lines)
    assert names(path) == []
    assert verdict(read_run(path)).startswith("numerics: ok: ")


def test_the_healthy_line_counts(folder):
    lines = [
        line(s, applied=s != 7, lost_updates={"a": 0.25 / 100, "b": 0.0}) for s in range(1, 41)
    ]
    text = verdict(read_run(folder(lines, precision="bf16-split")))
    assert text == "numerics: ok: 1 of 40 steps skipped, 0.1% of updates lost"
    text = verdict(read_run(folder([line(s) for s in range(1, 41)], "b", precision="bf16-sr")))
    assert text == "numerics: ok: 0 of 40 steps skipped; lost updates were not measured"
    assert verdict(read_run(folder(lines, "c"))) == "numerics: ok: 1 of 40 steps skipped"
    assert verdict(read_run(folder([], "none"))) == "the run took no step"


LOWER = "\ntry: halfstep train --config run/config.toml --output-dir run-2 --learning-rate 0.0001"


def test_a_loss_that_did_not_come_back(folder):
    losses = [*noisy(0)[:200], *["nan"] * 100]
    path = folder([line(s, loss=loss, learning_rate=3e-4) for s, loss in enumerate(losses, 1)])
    assert names(path) == ["diverged"]
    assert verdict(read_run(path)).endswith(LOWER)


def going(*levels, noise):
    """A loss that goes from each level to the next."""
    draw = random.Random(0)
    for old, new in itertools.pairwise(levels):
        yield from (new + (old - new) * 0.9**s + draw.gauss(0, noise) for s in range(150))


@pytest.mark.parametrize(
    ("levels", "noise", "rises"),
    [
        ((1, 1e-20, 9e-20), 0, False), ((0.7, 2e-6, 2e-5), 1e-6, False), ((1, 0, 0.01), 0, False),
        ((3, -5, -4.6), 0.1, False), ((-1, -9, -8), 0.01, False), ((2, 2, 2.3), 0.5, False),
        ((9, 1, 2, 1.1), 0.1, False), ((2, 0, 2, 1.5, 1, 0.7), 0, False), ((2, 0, 0.2), 0.1, False),
        ((0, -4, -1), 0.1, True), ((1.4, 0.4, 1.4), 0.1, True), ((0.7, 0.7, 4), 0.1, True),
        ((7, 3, 5), 0.3, True), ((7, 3, 90), 2, True), ((7, 3, 60, 9), 0.3, True),
    ],
)  # fmt: skip
def test_a_rise_counts_against_what_the_loss_had_fallen(folder, levels, noise, rises):
    """It is no fault of a loss of one's own, as a GAN's, which may rise by design."""
    lines = [line(s, loss=loss) for s, loss in enumerate(going(*levels, noise=noise), 1)]
    assert names(folder(lines)) == ["diverged"] * rises
    assert names(folder(lines, "own", task="module")) == ["rose"] * rises


def test_a_loss_that_grows_with_its_gradients_diverged(folder):
    lines = [line(s, loss=1.1**s, grad_norm=1.1**s, learning_rate=3.0) for s in range(1, 99)]
    path = folder(lines, task="module")
    assert names(path) == ["diverged"]
    assert verdict(read_run(path)).endswith(
        "try: Trainer(learning_rate=1, output_dir='run-2', ...).train()"
    )


def test_a_step_that_was_not_finite_without_a_cause(folder):
    last = line(21, **STOP, loss="nan", skip_reason="nonfinite_loss")
    path = folder([*(line(s) for s in range(1, 21)), last], steps=999)
    assert names(path) == ["stopped_nonfinite"]
    assert "No first cause was found" in findings(read_run(path))[0].remedy("en")


def test_a_loop_of_ones_own_is_advised_in_its_own_words(folder):
    """It has neither the trainer's keys and commands nor its search for a first cause."""
    lines = [line(s, loss=10.0**s, lost_updates={"a": 0.9}, learning_rate=1.0) for s in (1, 2, 3)]
    path = folder([*lines, line(4, **STOP, loss="nan", skip_reason="nonfinite_loss")])
    (path / "config.toml").write_text('precision = "bf16-pure"\n')
    found = findings(read_run(path))
    assert [f.name for f in found] == ["stopped_nonfinite", "lost_updates"]
    (path / "metrics.jsonl").write_text(json.dumps(line(4, applied=False, loss_scale=2.0**9)))
    assert names(path) == []  # the loop's last step was skipped, and none ended it
    said = "".join(f.remedy("en") + f.command for f in found)
    assert "No first cause was searched: halfstep.first_cause(precision, your_loss" in said
    for key in ("optimizer.", "run.", "schedule.", "--", "precision ="):
        assert key not in said


def test_skips_beyond_what_a_growing_scale_explains(folder):
    lines = [line(s, applied=s % 20 != 0, skip_reason="overflow") for s in range(1, 201)]
    path = folder([*lines, line(201)], precision="fp16-mixed")
    assert names(path) == ["many_skips"]
    assert names(folder(lines, "bf16")) == ["left_out"]  # which has no scale


def test_lost_updates_name_the_worst_groups(folder):
    shares = {"a": 0.95, "b": 0.2, "c": 0.05, "d": 0.5, "e": 0.3}
    path = folder([line(s, lost_updates=shares) for s in range(1, 30)], precision="bf16-pure")
    found = findings(read_run(path))
    assert [f.values["group"] for f in found] == ["a", "d", "e"]
    assert "bf16-split" in found[0].remedy("en")


def cosine(steps, peak=3e-4):
    """The learning rates of a schedule that ends at nearly nothing, as at 1.5e-7 of 1e-3."""
    return [max(peak * (1 + math.cos(math.pi * s / steps)) / 2, 1e-7) for s in range(1, steps + 1)]


def test_a_schedule_that_ends_near_0_loses_nothing_by_it(folder):
    """In fp32 too, updates at a rate of 1e-7 are below half a gap."""
    lines = [line(s, learning_rate=rate) for s, rate in enumerate(cosine(100), 1)]
    lines[49]["lost_updates"], lines[99]["lost_updates"] = {"a": 0.0}, {"a": 0.86}
    assert names(folder(lines, precision="bf16-pure")) == []


def test_one_measurement_of_many_condemns_no_run(folder):
    shares = {s: 0.5 if s == 30 else 0.01 for s in range(1, 31)}
    lines = [line(s, learning_rate=1e-3, lost_updates={"a": x}) for s, x in shares.items()]
    assert names(folder(lines, precision="bf16-pure")) == []


def test_a_run_that_loses_at_its_peak_is_told_although_it_ends_well(folder):
    lines = [
        line(s, learning_rate=rate, lost_updates={"a": 0.4 if rate > 3e-5 else 0.0})
        for s, rate in enumerate(cosine(100), 1)
    ]
    path = folder(lines, precision="bf16-pure")
    assert names(path) == ["lost_updates"]
    assert "40% of the updates of a" in verdict(read_run(path))


# What a verdict must not say


def test_a_stopping_spike_was_finite(folder):
    lines = [line(s) for s in range(1, 50)]
    path = folder([*lines, line(50, **STOP, skip_reason="loss_spike")], steps=100)
    assert names(path) == ["stopped_spike"]
    command = "halfstep train --resume --output-dir run --on-spike skip:10"
    assert findings(read_run(path))[0].command == command


def test_spikes_left_out_are_no_overflows(folder):
    lines = [
        line(s, **({"applied": False, "skip_reason": "loss_spike"} if s % 10 == 0 else {}))
        for s in range(1, 202)
    ]
    assert names(folder(lines)) == []


@pytest.mark.parametrize(("interval", "found"), [(8, []), (2000, ["many_skips"])])
def test_a_scale_that_grows_often_overflows_often(folder, interval, found):
    """One overflow in each interval of 8 steps is how the scale finds its limit."""
    policy = f"params=fp32,compute=fp16,scale=dynamic,growth_interval={interval}"
    lines = [line(s, applied=s % 8 != 0, loss_scale=1024.0) for s in range(1, 202)]
    assert names(folder(lines, precision=policy)) == found


def test_a_step_without_a_finite_loss_that_was_survived(folder):
    lines = [line(s) for s in range(1, 100)]
    lines[59] = line(60, applied=False, loss="nan", skip_reason="nonfinite_loss")
    path = folder(lines)
    assert names(path) == ["left_out"]


@pytest.mark.parametrize(
    ("policy", "loses"),
    [
        ("bf16-mixed", False),
        ("fp32", False),
        ("bf16-pure", True),
        ("bf16-sr", True),
        ("params=bf16,compute=bf16,master=bf16", True),
    ],
)
def test_fp32_masters_lose_nothing_that_another_format_would_keep(folder, policy, loses):
    lines = [line(s, learning_rate=1e-3, lost_updates={"a": 0.5}) for s in range(1, 30)]
    path = folder(lines, precision=policy)
    assert names(path) == (["lost_updates"] if loses else [])
    text = verdict(read_run(path))
    if loses:
        assert text.endswith(
            "\ntry: halfstep train --config run/config.toml --output-dir run-2 "
            "--precision bf16-split"
        )
    else:
        assert text == "numerics: ok: 0 of 29 steps skipped"


def test_the_first_cause_and_its_remedy_in_both_languages(folder):
    lines = [line(s) for s in range(1, 10)]
    path = folder([*lines, line(10, **STOP, skip_reason="forward")], steps=99)
    cause = {"step": 10, "cause_class": "overflow in a sum", "module": "layers.3"}
    cause |= {"op": "aten.add.Tensor", "remedy": "x.float() + y.float()"}
    (path / "causes.jsonl").write_text(json.dumps(cause) + "\n")
    (found,) = findings(read_run(path))
    assert found.text("en").endswith("overflow in a sum, in layers.3 (aten.add.Tensor)")
    assert found.remedy("en") == "To do: x.float() + y.float()."
    assert "求和溢出" in found.text("zh")
    assert "x.float() + y.float()" in found.remedy("zh")
    (path / "causes.jsonl").write_text(json.dumps({**cause, "cause_class": "a new one"}) + "\n")
    assert "a new one，位于 layers.3" in findings(read_run(path))[0].text("zh")


def test_every_remedy_is_translated_with_its_figures():
    large = Operand("input", torch.float16, 4.1e4, 0, 0)
    operands = (None, large, replace(large, name="a.weight", role="parameter"))
    kinds = itertools.product(REMEDIES, ("fp16", "bf16", "fp32"), ("", "exp", *OF_OPERATION))
    for kind, operand in itertools.product(kinds, operands):
        english = remedy_of(*kind, operand, fits=kind[1] == "fp16")
        chinese = translated(english, "zh")
        assert re.search("[\u4e00-\u9fff]", chinese), english
        assert not re.search(r"\b(is up to|clamp the|reload|scale|its|or train)\b", chinese)
    text = translated(remedy_of("overflow", "fp16", "exp", fits=True), "zh")
    assert text == "截断自变量：x.clamp(max=11.09)；或用 bf16-mixed 训练，它的范围与 fp32 相同"
    progress = Progress(LossScaleConfig())
    progress.losses.extend([(1, 6.956), (2, 54.4)])
    assert (
        translated(progress.slower(), "zh")
        == "降低学习率：损失从第 1 步的 6.956 升到第 2 步的 54.4"
    )


def test_an_interrupted_run_says_so_beside_its_health(folder):
    text = verdict(read_run(folder([line(s) for s in range(1, 50)], steps=100)))
    assert text.startswith("numerics: ok: 0 of 49 steps skipped")
    assert text.endswith(
        "The run ended at step 49 of 100\ntry: halfstep train --resume --output-dir run"
    )


def test_lines_that_could_not_be_read_are_a_note(folder):
    path = folder([line(s) for s in range(1, 50)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "lo')
    assert names(path) == ["damaged"]
    assert verdict(read_run(path)).startswith("numerics: ok")


def test_the_first_layer_that_left_its_past_is_named(folder):
    path = folder([line(s) for s in range(1, 100)])
    alarm = {"layer": "h.1", "quantity": "gradient", "since": 51, "step": 53, "times": 40.0}
    later = {**alarm, "layer": "h.2", "since": 52}
    with (path / "health.jsonl").open("w") as file:
        file.write('{"step": 50, "layers": {}, "alarms": []}\n{"step": 51, "alarms": [3]}\n')
        file.write(json.dumps({"step": 53, "alarms": [alarm, later]}) + "\n")
    (found,) = [f for f in findings(read_run(path)) if f.name == "layer_health"]
    assert found.text("en") == "h.1: gradient norm 40 times its median since step 51"


# What was learned, which sound numbers do not show


def curve(checks, losses=300, task="pretrain", words=1024, right=None):
    """A run with these validation losses by step, over a training loss that falls from 7 to 4."""
    losses = losses if isinstance(losses, list) else [7 - 3 * s / losses for s in range(losses)]
    lines = [line(s, loss=loss, learning_rate=3e-4) for s, loss in enumerate(losses, 1)]
    for step, value in checks.items():
        lines[step - 1] |= {"val_loss": value} | ({"val_accuracy": right[step]} if right else {})
    return {"lines": lines, "task": task, "vocabulary": words}


MORE = "try: halfstep train --resume --output-dir run --max-steps 300"
ANEW = "try: halfstep train --config run/config.toml --output-dir run-2"
FEWER = f"{ANEW} --max-steps 100"
FLAT, SURE = [7.0] * 300, [0.7 - 0.002 * s for s in range(300)]
ROSE = {100: 4.0, 200: 4.3, 300: 4.9}


@pytest.mark.parametrize(
    ("run", "found", "ends"),
    [
        # the first command of the README, before it had enough steps
        (curve({20: 7.5427}, FLAT[:20]), "guessing",
         f"The validation loss is 7.543; a guess among 1,024 tokens has 6.931\n{MORE}"),
        (curve({40: 6.6}, FLAT[:40]), "guessing", MORE),
        (curve({40: 6.1}, 40), "", ""),
        (curve({300: 6.6}), "", ""),  # so many steps are judged by the guess alone
        (curve({300: 7.0}, FLAT), "guessing", "a guess among 1,024 tokens has 6.931"),
        (curve({300: 7.0}), "guessing", f"{ANEW} --max-steps 150"),
        (curve({300: 3.0}, words=0), "", ""),
        (curve(ROSE), "worsened",
         f"The validation loss rose from 4 at step 100 to 4.9\n{FEWER}"),
        (curve({100: 4.0, 200: 4.1, 300: 4.15}), "", ""),
        (curve({100: 0.03, 200: 0.04, 300: 0.05}), "", ""),  # of the 7 that it fell
        (curve(ROSE, [4.0] * 300), "worsened", "to 4.9"),  # no rate is named
        (curve({100: 4.0, 200: 4.01, 300: 4.3}, [4.0] * 300), "", ""),
        (curve({100: 0.3, 300: 0.4}, SURE, "classify", right={100: 0.8, 300: 0.81}), "worsened",
         "0 of 300 steps skipped"),
        (curve({100: 0.3, 300: 0.4}, SURE, "classify", right={100: 0.8, 300: 0.7}), "worsened",
         FEWER.replace("train", "finetune classify")),
        (curve(ROSE, task="module"), "worsened",
         "\ntry: Trainer(max_steps=100, output_dir='run-2', ...).train()"),
    ],
)  # fmt: skip
def test_what_was_learned_is_said_beside_the_numerics(folder, run, found, ends):
    path = folder(**run)
    assert names(path) == ([found] if found else [])
    text = verdict(read_run(path))
    assert text.startswith("numerics: ok: 0 of")
    assert text.endswith(ends)


def test_outputs_that_are_not_finite_in_the_evaluation_alone_are_a_fault(folder):
    path = folder(**curve({100: 4.0, 300: "nan"}))
    assert names(path) == ["unscored"]
    said = "The validation loss is nan at step 300 (0 of 300 steps skipped)\ntry: halfstep evaluate"
    assert verdict(read_run(path)) == f"{said} --run run --precision fp32"


@pytest.mark.parametrize(
    ("rows", "steps", "says"),
    [
        ([[0, 30], [0, 30]], 20, "answers good for 60 of 60 validation examples, 30 of which have"),
        ([[1, 29], [0, 30]], 300, "answers good for 59 of 60 validation examples, 30 of which"),
        ([[0, 10], [0, 190]], 300, "answers good for 200 of 200 validation examples, 10 of"),
        ([[16, 14], [15, 15]], 300, "is right for 51.7% of 60 validation examples, of which 50"),
        ([[18, 12], [12, 18]], 20, "is right for 60.0% of 60 validation examples, of which 50"),
        ([[18, 12], [12, 18]], 300, ""),
        ([[0, 2], [0, 60]], 300, ""),  # too few of the other class
        ([[85, 15], [150, 750]], 300, ""),  # less often right than the most frequent label
        ([[30, 0], [0, 0]], 300, ""),  # one class, all of it right
        ([["x", 30], [0, 30]], 20, ""),  # no scores at all
        ([[0, 30]], 20, ""),
        ([[0, 0], [0, 0]], 20, ""),
    ],
)
def test_a_classifier_that_guesses(folder, rows, steps, says):
    path = folder(**curve({steps: 0.7}, [0.7] * steps, "classify"))
    scores = {"labels": ["bad", "good"], "confusion": rows, "step": steps}
    (path / "report.json").write_text(json.dumps(scores))
    text = verdict(read_run(path))
    assert names(path) == (["guessing"] if says else [])
    assert says in text
    assert ("--resume --output-dir run --max-steps 300" in text) is (bool(says) and steps < 200)


def test_learning_is_not_judged_where_the_numbers_were_not_sound_or_steps_are_missing(folder):
    run = curve({20: 7.5}, 20)
    assert names(folder(**run, name="more", steps=300)) == ["unfinished"]
    for each in run["lines"]:
        each["lost_updates"] = {"a": 0.5}
    assert names(folder(**run, precision="bf16-pure")) == ["lost_updates"]
