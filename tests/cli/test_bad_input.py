"""What makes no sense or cannot fit is refused in one line, with code 2, before anything is made.

In one process: each case would take seconds as a program of its own.
"""

from __future__ import annotations

import pytest

from halfstep.cli.main import main


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused; returns its one line."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))

    def run(*arguments, words=""):
        code = main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        lines = [line for line in found.err.splitlines() if "error:" in line]
        assert code == 2, found.err
        assert len(lines) == 1, found.err
        assert "unexpected" not in lines[0]
        assert len(lines[0]) < 2100
        for word in words.split("|"):
            assert word in lines[0], lines[0]
        assert {
            path for path in set(tmp_path.rglob("*")) - before if path.name not in ("r", "run.lock")
        } == set()
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--max-steps", "soon"], "gpt-small-cpu: key run.max_steps: 'soon'|an integer"),
        (["train", "--precision", "bf61"], "did you mean 'bf16'"),
        (["train", "--precision", "tf32", "--device", "cpu"], "nearest"),
        (["train", "--device", "tpu"], "auto, cpu, cuda"),
        (["train", "--config", "gpt-tinny"], "did you mean 'gpt-tiny'"),
        (["train", "--block-size", "5000"], "model.block_size"),
        (["train", "--data", "/no/such/file.txt"], "/no/such/file.txt"),
        (["train", "--resume"], "--output-dir"),
        (["train", "--parallel", "pipe=2"], "'pipe=2'; allowed: each of data, shard, tensor once"),
        (["train", "--on-nonfinite", "skip"], "allowed: stop, skip:K"),
        (["generate", "--run", "/tmp"], "holds no run"),
        (["doctor", "--run.seed", "3"], "unknown option --run.seed; see halfstep doctor --help"),
    ],
)
def test_a_mistake_is_one_line(refused, words, message):
    refused(*words, words=message)


def test_an_error_line_does_not_steer_the_terminal(refused):
    line = refused("export", "--run", "\x1b[31mred\x07", "--to", "hf", "--output", "o")
    assert "\x1b" not in line
    assert "\x07" not in line
    assert r"\x1b[31mred\x07" in line
