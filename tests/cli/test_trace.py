"""The command halfstep trace: one step of a configuration or run."""

from __future__ import annotations

import json

import pytest

from halfstep.cli.main import main


def test_a_configuration(settings, tmp_path, capsys):
    saved = tmp_path / "trace.json"
    assert main(["trace", *settings, "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "layers.0.attn" in out
    assert "optimizer exp_avg_sq" in out
    assert out.splitlines()[-1] == "all operations ran as bf16-mixed says"
    assert json.loads(saved.read_text())["policy"] == "bf16-mixed"


def test_a_run_as_json(settings, tmp_path, capsys):
    path = str(tmp_path / "r")
    train = [*settings, "--max-steps", "2", "--precision", "bf16-split", "--quiet",
             "--output-dir", path]  # fmt: skip
    assert main(["train", *train]) == 0
    before = sorted(p.name for p in (tmp_path / "r").rglob("*"))
    capsys.readouterr()
    assert main(["trace", path, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["policy"], table["differences"]) == ("bf16-split", [])
    assert {"weights", "gradients"} <= {holding["kind"] for holding in table["stored"]}
    assert sorted(p.name for p in (tmp_path / "r").rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a run folder or --config"),
        (["runs/x", "--config", "gpt-tiny"], "give a run folder or --config"),
        (["runs/x", "--data", "y"], "--data goes with --config"),
        (["runs/none"], "holds no run"),
        (["--config", "gpt-tinny"], "gpt-tiny"),
    ],
)
def test_what_cannot_be_traced(words, said, capsys):
    assert main(["trace", *words]) == 2
    assert said in capsys.readouterr().err
