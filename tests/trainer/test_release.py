"""The trainer with gradients released during backward: the same run, resumed, and refusals."""

from __future__ import annotations

import json

import pytest

from halfstep.cli.main import main
from halfstep.errors import ConfigError, PrecisionError
from halfstep.optim import AdamW
from trainer.runs import assert_same_tensors, metrics, newest, run, small_config

SPLIT = "bf16-split24,moments=8bit"
PLAIN = {"optimizer__max_norm": 0}
RELEASED = {**PLAIN, "optimizer__release_gradients": True}


def without_norm(path):
    """The metrics but for the norm, whose additions have another order, and the memory's figure."""
    return [{k: v for k, v in line.items() if k != "grad_norm"} for line in metrics(path)]


@pytest.mark.parametrize("policy", [SPLIT, "bf16-mixed"])
def test_a_run_is_that_without_and_resumes_bit_for_bit(corpus, tmp_path, policy):
    kept = small_config(corpus, policy, run__ema_decay=0.9, **PLAIN)
    released = small_config(corpus, policy, run__ema_decay=0.9, **RELEASED)
    session, _ = run(released, tmp_path / "released")
    assert isinstance(session.precision.optimizers[0], AdamW)  # also where torch's would do
    run(released, tmp_path / "cut", until=4)
    run(released, tmp_path / "cut")
    assert metrics(tmp_path / "released") == metrics(tmp_path / "cut")
    assert_same_tensors(newest(tmp_path / "released").weights, newest(tmp_path / "cut").weights)
    if policy == SPLIT:  # else torch's optimizer trains the other run
        run(kept, tmp_path / "kept")
        assert without_norm(tmp_path / "kept") == without_norm(tmp_path / "released")
        found = newest(tmp_path / "kept"), newest(tmp_path / "released")
        assert_same_tensors(found[0].weights, found[1].weights)
        assert_same_tensors(found[0].optimizer, found[1].optimizer)
    assert session.memory.part("gradients") < session.memory.part("weights")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer__max_norm": 1.0}, "add --optimizer.max_norm 0"),
        ({"run__grad_accum": 2}, "run.grad_accum=2"),
        ({"run__watch": 1}, "run.watch=1"),
        ({"run__capture": 2}, "run.capture"),
        ({"run__compile": True}, "run.compile=true"),
    ],
)
def test_a_configuration_that_needs_all_gradients_is_refused(corpus, options, words):
    with pytest.raises(ConfigError, match=f"release_gradients=true with .*{words}|{words}"):
        small_config(corpus, SPLIT, **{**RELEASED, **options})


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("fp16-mixed", {}, "its loss scale skips"),
        (SPLIT, {"run__on_nonfinite": "skip:2"}, "on_nonfinite=skip:2"),
        (SPLIT, {"run__on_spike": "stop"}, "on_spike=stop"),
        (SPLIT, {"optimizer__name": "nadam"}, "NAdam"),
    ],
)
def test_a_run_that_undoes_steps_is_refused(corpus, tmp_path, policy, options, words):
    config = small_config(corpus, policy, **{**RELEASED, **options})
    with pytest.raises(PrecisionError, match=words):
        run(config, tmp_path / "run")


def test_estimate_leaves_the_gradients_out(capsys):
    arguments = ["estimate", "--params", "1.3B", "--precision", SPLIT, "--json"]
    totals = []
    for more in ([], ["--release-gradients"]):
        assert main([*arguments, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)["policies"]
        totals.append(row["total"] / 1.3e9)
    # 2 of the weight, 1 of the remainder, 2 of the moments and their scales: 2 in 128; gradients: 2
    assert totals == pytest.approx([7 + 2 / 128, 5 + 2 / 128], rel=1e-3)
    assert main([*arguments, "--release-gradients", "--parallel", "shard=2"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    assert main(["estimate", "--precision", "fp16-mixed", "--release-gradients"]) == 2
    assert "its loss scale skips" in capsys.readouterr().err
