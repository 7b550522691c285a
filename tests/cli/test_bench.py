"""The command: what its words mean, and what it prints of real runs."""

import json

import pytest

from halfstep.cli import bench as command
from halfstep.cli.grammar import read_words

SMALL = ["--n-layer", 1, "--n-embd", 32, "--n-head", 2, "--block-size", 32, "--tokenizer", "bytes",
         "--batch-size", 4, "--device", "cpu"]  # fmt: skip


def test_each_policy_has_a_run_and_a_row_and_a_refused_one_says_why(halfstep, corpus, tmp_path):
    words = ["bench", "--config", "gpt-tiny", "--steps", 8, "--out", tmp_path / "b", "--precision"]
    done = halfstep(*words, "fp32", "bf16-split", "tf32", "--", *SMALL, "--data", corpus)
    assert done.returncode == 0, done.stderr
    _, fp32, split, refused = done.stdout.splitlines()
    assert (fp32.split()[0], fp32.split()[-1], split.split()[0]) == ("fp32", "0.0%", "bf16-split")
    assert refused.startswith("tf32: ")
    assert "a CPU has no tf32" in refused
    for policy in ("fp32", "bf16-split"):
        lines = (tmp_path / "b" / policy / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 8


@pytest.fixture
def asked(monkeypatch):
    """The configurations of runs that are not trained but made up."""
    asked = []

    def made_up(config, folder):
        asked.append(config)
        folder.mkdir(parents=True)
        lines = [{"step": n, "loss": 4.0 - n, "tokens_per_second": 10.0 * n, "applied": True,
                  "learning_rate": 1e-3,
                  "peak_memory_bytes": 10_000_000} for n in range(1, 5)]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return command.subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(command, "train_apart", made_up)
    return asked


def test_a_table_is_printed_and_the_task_is_the_configurations(halfstep, tmp_path, asked):
    words = ["--config", "lm-lora", "--precision", "fp32", "bf16-mixed", "--out", tmp_path / "b"]
    done = halfstep("bench", *words, "--", "--model", "./folder", "--max-length", "99")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["fp32", "40", "1.00", "10", "MB", "0.0000", "-"]
    assert (asked[0].TASK, asked[0].data.max_length, asked[0].run.max_steps) == ("lm", 99, 30)


def test_a_demo_ends_with_a_verdict_and_a_page(halfstep, tmp_path, asked):
    done = halfstep("demo", "--config", "gpt-tiny", "--out", tmp_path / "d",
                    "--", "--device", "cpu")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (str(asked[0].precision), str(asked[-1].precision)) == ("fp32", "fp16-mixed")
    assert {config.run.max_steps for config in asked} == {80}
    assert done.stdout.endswith(f"Written: {tmp_path / 'd' / 'report.html'}\n")
    assert "fp16-mixed" in (tmp_path / "d" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save-every", "3"], "unknown option --save-every"),
        (["--steps", "0"], "steps=0; allowed: integers >= 1"),
        (["--precision", "bf61"], "unknown precision policy 'bf61'"),
        (["--", "--lora-r", "3"], "unknown option --lora-r"),
        (["--config", "nothing"], "unknown configuration 'nothing'"),
    ],
)
def test_a_mistake_says_what_is_meant(halfstep, words, message):
    done = halfstep("bench", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_options_of_the_training_follow_two_dashes():
    name, asked = read_words(["bench", "--steps", "2", "--", "--seed", "3"])
    assert (name, asked.words, asked.steps) == ("bench", ("--seed", "3"), 2)
