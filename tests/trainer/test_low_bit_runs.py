"""Runs of the trainer below 16 bits: resumed, evaluated, generated from, exported, traced."""

from __future__ import annotations

from halfstep.cli.main import main
from halfstep.trainer.config.config import config_to_toml
from trainer.runs import small_config

NVFP4 = "nvfp4,simulate=yes"


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
