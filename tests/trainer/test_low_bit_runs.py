"""Runs of the trainer below 16 bits: resumed, evaluated, generated from, exported, traced."""

from __future__ import annotations

import pytest

from halfstep.cli.main import main
from halfstep.trainer.config.config import config_to_toml
from trainer.runs import assert_same_tensors, metrics, newest, run, small_config

NVFP4 = "nvfp4,simulate=yes"


@pytest.mark.parametrize(
    "policy",
    [
        NVFP4,
        "bf16-split,recipe=mxfp8,simulate=yes,moments=8bit",
        "fp8,simulate=yes",
    ],
)
@pytest.mark.filterwarnings("ignore:the second moments of parameter")  # they may become bf16
def test_a_run_below_16_bits_resumes_bit_for_bit(corpus, tmp_path, policy):
    config = small_config(corpus, policy, model__dropout=0.1, run__grad_accum=2)
    _, whole = run(config, tmp_path / "whole")
    run(config, tmp_path / "cut", until=4)
    run(config, tmp_path / "cut")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert_same_tensors(a.weights, b.weights)
    assert a.state["precision"] == b.state["precision"]
    assert whole[-1].record.step == 8


def test_commands_on_a_run_below_16_bits(corpus, tmp_path, capsys):
    config, path = tmp_path / "tiny.toml", str(tmp_path / "run")
    config.write_text(config_to_toml(small_config(corpus, NVFP4)))
    assert main(["train", "--config", str(config), "--output-dir", path, "--quiet"]) == 0
    for command in (
        ["evaluate", "--run", path],
        ["generate", "--run", path, "--prompt", "the", "--max-new-tokens", "4"],
        ["export", "--run", path, "--to", "hf", "--output", str(tmp_path / "exported")],
    ):
        assert main(command) == 0, (command, capsys.readouterr().err)
    capsys.readouterr()
    assert main(["trace", path]) == 0
    weights = [line for line in capsys.readouterr().out.splitlines() if "wgrad" in line]
    assert weights
    assert all("nvfp4 simulated" in line for line in weights)
