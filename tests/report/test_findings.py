"""Each rule on runs with one thing wrong, and none of them on healthy runs."""

import json
import math
import random

import pytest

from halfstep.diagnostics.nonfinite.cause import remedy_of
from halfstep.report.findings import findings, verdict
from halfstep.report.record import read_run
from report.conftest import line, tensor, watch


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
    assert verdict(read_run(path)).startswith("healthy: ")


def test_the_healthy_line_counts(folder):
    lines = [
        line(s, applied=s != 7, lost_updates={"a": 0.25 / 100, "b": 0.0}) for s in range(1, 41)
    ]
    assert (
        verdict(read_run(folder(lines))) == "healthy: 1 of 40 steps skipped, 0.1% of updates lost"
    )
    text = verdict(read_run(folder([line(s) for s in range(1, 41)], "other")))
    assert text == "healthy: 0 of 40 steps skipped; lost updates were not measured"
    assert verdict(read_run(folder([], "none"))) == "the run took no step"


def test_a_run_that_ended_in_nan(folder):
    lines = [line(s) for s in range(1, 10)]
    lines.append(line(10, applied=False, loss="nan", skip_reason="nonfinite_loss"))
    path = folder(lines, steps=100)
    assert names(path) == ["stopped_nonfinite"]
    text = verdict(read_run(path))
    assert text == "Step 10 was not finite, and the run ended there (1 of 10 steps skipped)"


def test_a_run_that_was_interrupted_is_a_note(folder):
    path = folder([line(s) for s in range(1, 50)], steps=100)
    assert names(path) == ["unfinished"]
    assert verdict(read_run(path)).startswith("healthy")


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_rose_and_stayed(folder, seed):
    losses = noisy(seed)
    losses[200:] = [loss + 3 for loss in losses[200:]]
    path = folder([line(step, loss=loss) for step, loss in enumerate(losses, 1)])
    assert names(path) == ["diverged"]


def test_a_loss_that_became_nan_and_went_on(folder):
    losses = [*noisy(0)[:200], *["nan"] * 100]
    path = folder([line(step, loss=loss) for step, loss in enumerate(losses, 1)])
    assert names(path) == ["diverged"]


def test_skips_beyond_what_a_growing_scale_explains(folder):
    lines = [line(s, applied=s % 20 != 0, loss_scale=1024.0) for s in range(1, 201)]
    assert names(folder([*lines, line(201)])) == ["many_skips"]


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
    for every in (50, 100):
        lines = [
            line(s, learning_rate=rate, **({"lost_updates": {"a": lost}} if s % every == 0 else {}))
            for s, rate in enumerate(cosine(100), 1)
            for lost in [0.86 if s == 100 else 0.0]
        ]
        path = folder(lines, f"every-{every}", precision="fp32")
        assert names(path) == []
        known = "0.0% of updates lost" if every == 50 else "lost updates were not measured"
        assert known in verdict(read_run(path))


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


def test_faults_come_first(folder):
    lines = [line(s, lost_updates={"a": 0.9}) for s in range(1, 9)]
    lines += [line(9, applied=False, loss="nan", skip_reason="forward")]
    path = folder(lines, steps=50, precision="bf16-pure")
    assert names(path) == ["stopped_nonfinite", "lost_updates"]


@pytest.mark.parametrize(("scale", "found"), [(1.0, True), (2.0**5, False)])
def test_gradients_that_the_scale_in_force_does_not_save(folder, scale, found):
    """A fifth of them is below 2^-25; times 32 all are above."""
    path = folder([line(1), line(2)], precision="fp16-mixed")
    watch(path, tensor("blocks.3"), scale=scale)
    assert names(path) == (["fp16_underflow"] if found else [])
    if found:
        assert verdict(read_run(path)).startswith("fp16 flushes 20.0% of blocks.3 to 0 ")


def test_an_output_near_the_end_of_fp16(folder):
    path = folder([line(1), line(2)], precision="fp16-mixed")
    watch(path, tensor("mlp", "activation", {"3": 10}, absmax=12.0))
    assert names(path) == []
    watch(path, tensor("mlp", "activation", {"14": 10}, absmax=30000.0), step=2)
    assert names(path) == ["fp16_headroom"]


# What a verdict must not say


def test_a_few_steps_are_too_few_to_judge(folder):
    text = verdict(read_run(folder([line(s) for s in range(1, 4)])))
    assert text == "too short to judge: 0 of 3 steps skipped"


def test_a_stopping_spike_was_finite(folder):
    lines = [line(s) for s in range(1, 50)]
    path = folder([*lines, line(50, applied=False, skip_reason="loss_spike")], steps=100)
    assert names(path) == ["stopped_spike"]
    assert "halfstep train --resume --output-dir run" in findings(read_run(path))[0].remedy("en")


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
    ("policy", "name"),
    [
        ("bf16-mixed", "lost_in_fp32"),
        ("fp32", "lost_in_fp32"),
        ("bf16-pure", "lost_updates"),
        ("bf16-sr", "lost_updates"),
        ("params=bf16,compute=bf16,master=bf16", "lost_updates"),
    ],
)
def test_what_cures_lost_updates_depends_on_the_weights_dtype(folder, policy, name):
    path = folder([line(s, lost_updates={"a": 0.5}) for s in range(1, 30)], precision=policy)
    assert names(path) == [name]
    remedy = findings(read_run(path))[0].remedy("en")
    assert ("learning_rate" in remedy) is (name == "lost_in_fp32")
    assert ("Set precision" in remedy) is (name == "lost_updates")


def test_the_first_cause_and_its_remedy_in_both_languages(folder):
    lines = [line(s) for s in range(1, 10)]
    path = folder([*lines, line(10, applied=False, skip_reason="forward")], steps=99)
    cause = {"step": 10, "cause_class": "overflow in a residual sum", "module": "layers.3"}
    cause |= {"op": "aten.add.Tensor", "remedy": "x.float() + y.float()"}
    (path / "causes.jsonl").write_text(json.dumps(cause) + "\n")
    (found,) = findings(read_run(path))
    assert found.text("en").endswith("overflow in a residual sum, in layers.3 (aten.add.Tensor)")
    assert found.remedy("en") == "To do: x.float() + y.float()."
    assert "残差相加溢出" in found.text("zh")
    assert "x.float() + y.float()" in found.remedy("zh")
    cause["remedy"] = remedy_of(cause["cause_class"], "fp16")
    (path / "causes.jsonl").write_text(json.dumps(cause) + "\n")
    assert findings(read_run(path))[0].remedy("zh").endswith("它的范围与 fp32 相同。")
    (path / "causes.jsonl").write_text(json.dumps({**cause, "cause_class": "a new one"}) + "\n")
    assert "a new one，位于 layers.3" in findings(read_run(path))[0].text("zh")


def test_an_interrupted_run_says_so_beside_its_health(folder):
    text = verdict(read_run(folder([line(s) for s in range(1, 50)], steps=100)))
    assert text.startswith("healthy: 0 of 49 steps skipped")
    assert text.endswith("The run ended at step 49 of 100")


def test_lines_that_could_not_be_read_are_a_note(folder):
    path = folder([line(s) for s in range(1, 50)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "lo')
    assert names(path) == ["damaged"]
    assert verdict(read_run(path)).startswith("healthy")


@pytest.mark.parametrize("rises", [False, True])
def test_the_first_layer_that_left_its_past_is_named(folder, rises):
    path = folder([line(s, loss=9.0 if rises and s >= 70 else 2.0) for s in range(1, 100)])
    alarm = {"layer": "h.1", "quantity": "gradient", "since": 51, "step": 53, "times": 40.0}
    later = {**alarm, "layer": "h.2", "since": 52}
    with (path / "health.jsonl").open("w") as file:
        file.write('{"step": 50, "layers": {}, "alarms": []}\n{"step": 51, "alarms": [3]}\n')
        file.write(json.dumps({"step": 53, "alarms": [alarm, later]}) + "\n")
    (found,) = [f for f in findings(read_run(path)) if f.name == "layer_health"]
    said = "h.1: gradient norm 40 times its median since step 51"
    assert found.text("en") == said + ("; the loss rises at step 70" if rises else "")
