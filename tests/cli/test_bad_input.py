"""What makes no sense or cannot fit is refused in one line, with code 2, before anything is made.

In one process: each case would take seconds as a program of its own.
"""

from __future__ import annotations

import os

import pytest

from halfstep.cli.main import main

TINY = [
    "--config", "gpt-tiny", "--tokenizer", "bytes", "--device", "cpu", "--precision", "fp32",
    "--model.n_layer", "1", "--model.n_embd=32", "--model.n_head", "2", "--model.block_size=32",
    "--batch-size", "4", "--run.eval_batches", "2", "--quiet",
]  # fmt: skip
LONG = "x" * 300


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
        (["train", "--device", "tpu"], "auto, cpu, mps, cuda"),
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-steps", "9" * 5000], "run.max_steps|allowed: an integer"),
        (["--output-dir", LONG], "File name too long"),
        (["--config", LONG], "unknown configuration"),
        (["--config", LONG + ".toml"], "cannot be read"),
        (["--precision", "bf16" * 1000], "unknown precision policy"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be(refused, corpus, options, words):
    data = [] if "--data" in options else ["--data", corpus]
    folder = [] if "--output-dir" in options else ["--output-dir", "r"]
    refused("train", *TINY, *data, *folder, *options, words=words)
    assert not os.path.exists("r")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps = " + "9" * 5000, "cannot be read"),
        ("x = " + "[" * 20000 + "]" * 20000, "cannot be read"),
        ("x" + ".x" * 3000 + " = 1", "unknown key x"),
        ('task = ["pretrain"]', "key task"),
        ('task = "pretrain"\n[model]\nn_layer = "\\u0000"', "n_layer"),
        ("model = 3", "a section is expected"),
    ],
    ids=["digits", "brackets", "dots", "task", "nul in a number", "no section"],
)  # fmt: skip
def test_a_configuration_that_is_none(refused, tmp_path, text, words):
    path = tmp_path.parent / "bad.toml"
    path.write_text(text)
    refused("train", "--config", path, words=words)


def test_an_error_line_does_not_steer_the_terminal(refused):
    line = refused("export", "--run", "\x1b[31mred\x07", "--to", "hf", "--output", "o")
    assert "\x1b" not in line
    assert "\x07" not in line
    assert r"\x1b[31mred\x07" in line
