"""The commands trace and memory: one step of a run, of which nothing is kept."""

from __future__ import annotations

import pytest

from halfstep.cli.main import main


def test_a_run_is_left_as_it_was(settings, tmp_path, capsys):
    path = tmp_path / "r"
    train = ["--max-steps", "2", "--precision", "bf16-mixed", "--quiet", "--output-dir", str(path)]
    assert main(["train", *settings, *train]) == 0
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(["trace", str(path)]) == 0
    assert capsys.readouterr().out.endswith("all operations ran as bf16-mixed says\n")
    assert main(["memory", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["fp32", "bf16-mixed"]
    policies = ["fp32", "bf16-split,moments=8bit"]
    assert main(["memory", str(path), "--precision", *policies]) == 0
    head, wide, split, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["policy", "weights", "masters"]
    assert wide.split()[0] == "fp32"
    assert wide.endswith("1.00")
    assert split.split()[0] == "bf16-split,moments=8bit"
    assert float(split.split()[-1]) < 0.75
    after = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    assert before == after


@pytest.mark.parametrize("command", ["trace", "memory"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: RUN"),
        (["runs/none"], "holds no run"),
    ],
)
def test_what_cannot_be_looked_at(command, words, said, capsys):
    assert main([command, *words]) == 2
    assert said in capsys.readouterr().err
