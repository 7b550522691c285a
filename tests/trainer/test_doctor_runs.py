"""``halfstep doctor RUN``: each rule finds its mistake in a run, alone, and no other run's."""

import json
import math

import pytest
import torch

from halfstep.cli.main import main
from halfstep.diagnostics.nonfinite.cause import Cause
from halfstep.errors import ConfigError
from halfstep.trainer.doctor.runs import RUN_RULES, changed, check_run, facts_of
from halfstep.trainer.run.metrics import Record
from trainer.runs import run, small_config

HEALTHY = [{"step": i, "applied": True, "loss": 2.0, "loss_scale": 65536.0} for i in range(1, 31)]


def healthy(policy="fp16-mixed"):
    state = {"precision": {"policy": policy, "loss_scale": {"value": 65536.0}}}
    return facts_of(small_config("x.txt", policy), HEALTHY, state)


@pytest.mark.parametrize("rule", RUN_RULES, ids=lambda rule: rule.name)
def test_each_rule_finds_its_mistake_alone(rule):
    assert [r.name for r in RUN_RULES if r.find(healthy())] == []
    found = [r.name for r in RUN_RULES if r.find(changed(healthy(), rule.bad))]
    assert found == [rule.name]


@pytest.mark.parametrize(
    "records",
    [
        # a scale that is still searching may skip
        [{**HEALTHY[0], "applied": False, "calibrating": True}] * 20 + HEALTHY,
        # one skip in 30
        [{**HEALTHY[0], "applied": False, "skip_reason": "overflow"}, *HEALTHY],
        # updates were lost at first and are not any more
        [{**HEALTHY[0], "lost_updates": {"a": 0.5}}, {**HEALTHY[1], "lost_updates": {"a": 0.01}}],
        [],
    ],
)
def test_what_is_healthy(records):
    assert [r.name for r in RUN_RULES if r.find(changed(healthy(), {"records": records}))] == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_found_as_a_run_writes_it(loss):
    record = Record(step=31, applied=False, loss=loss, skip_reason="nonfinite_loss")
    records = [*HEALTHY, json.loads(record.to_json())]
    found = [r.name for r in RUN_RULES if r.find(changed(healthy(), {"records": records}))]
    assert found == ["loss-not-finite"]


@pytest.mark.parametrize("lost", [{"a": "x"}, {"a": None}, {"a": "nan"}, {}, [0.5], {"b": []}])
def test_shares_that_are_no_numbers_are_passed_over(lost):
    records = [*HEALTHY, {**HEALTHY[-1], "lost_updates": lost}]
    assert [r.name for r in RUN_RULES if r.find(changed(healthy(), {"records": records}))] == []


def test_a_real_run(corpus, tmp_path, capsys):
    path = tmp_path / "r"
    run(small_config(corpus, "fp16-mixed"), path)
    # this test's helper writes no metrics; a line as the trainer writes it
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in HEALTHY))
    assert check_run(path) == []
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "applied": fal')  # a killed process leaves this
    assert check_run(path) == []
    assert main(["doctor", str(path)]) == 0
    assert "no known mistake of precision" in capsys.readouterr().out
    state = path / "checkpoints" / "step-00000008" / "state.json"
    saved = json.loads(state.read_text())
    del saved["precision"]["loss_scale"]
    state.write_text(json.dumps(saved))
    assert [finding.rule for finding in check_run(path)] == ["scaler-not-saved"]
    assert main(["doctor", str(path), "--json"]) == 3
    (found,) = json.loads(capsys.readouterr().out)
    assert found["path"] == str(path / "checkpoints")


def test_a_known_cause_stands_for_the_steps_that_it_broke(corpus, tmp_path, capsys):
    path = tmp_path / "r"
    run(small_config(corpus, "fp16-mixed"), path, until=1)
    broken = {"step": 31, "applied": False, "loss": "nan", "skip_reason": "nonfinite_loss"}
    skips = [{**HEALTHY[0], "applied": False, "skip_reason": "overflow"}] * 10
    lines = [json.dumps(line) + "\n" for line in (*HEALTHY, *skips, broken)]
    (path / "metrics.jsonl").write_text("".join(lines))
    assert [found.rule for found in check_run(path)] == ["many-skips", "loss-not-finite"]
    cause = Cause(
        *("overflow", "aten.mm.default", "mlp.fc", "Linear", "", "forward"),
        *(torch.float16, 0, 4, 4, (), "", "", "weights diverged"),
    )
    (path / "causes.jsonl").write_text(json.dumps(cause.to_json()) + "\n")
    assert main(["doctor", str(path)]) == 3
    said = capsys.readouterr().out
    assert said.startswith(f"{path / 'causes.jsonl'}:1: weights diverged: aten.mm.default in fp16")
    assert "mlp.fc" in said
    assert "write: lower the learning rate" in said
    assert "[many-skips]" not in said
    assert "[loss-not-finite]" not in said


def test_what_is_no_run(tmp_path, capsys):
    with pytest.raises(ConfigError, match="holds no run"):
        check_run(tmp_path)
    (tmp_path / "notes.txt").write_text("notes")
    for target in (tmp_path, tmp_path / "notes.txt"):
        assert main(["doctor", str(target)]) == 2
    assert "neither a run's folder nor a .py file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{\n", "[1]\n", "1\n", "\xff"])
def test_damaged_metrics_are_refused(corpus, tmp_path, text):
    path = tmp_path / "r"
    run(small_config(corpus, "fp32"), path, until=1)
    (path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"metrics"):
        check_run(path)


def test_scripts_and_runs_on_one_command_line(tmp_path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import torch\n")
    bad.write_text("import torch\nt = torch.arange(n, dtype=torch.bfloat16)\n")
    assert main(["doctor", str(good)]) == 0
    capsys.readouterr()
    assert main(["doctor", str(good), str(bad)]) == 3
    said = capsys.readouterr().out
    assert said.startswith(f"{bad}:2: positions or their frequencies are in 16 bits")
    assert main(["doctor", str(good), "--device", "T4"]) == 2
    assert "leave out one or the other" in capsys.readouterr().err
