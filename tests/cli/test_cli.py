"""The command line as a user meets it: exit codes, one-line errors, files, --help at once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from halfstep.cli.commands import COMMANDS
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint
from halfstep.trainer.models.gpt import GPT

SMALL = [
    "--config", "gpt-tiny", "--tokenizer", "bytes", "--device", "cpu",
    "--model.n_layer", "1", "--model.n_embd=32", "--model.n_head", "2", "--model.block_size=32",
    "--batch-size", "4", "--schedule.warmup_steps", "2", "--run.eval_batches", "2",
]  # fmt: skip


def test_help_does_not_import_torch_and_every_command_has_one():
    program = (
        "import sys; from halfstep.cli.main import main\n"
        "from halfstep.cli.commands import COMMANDS\n"
        "for name in ['', *COMMANDS]: assert main([*name.split(), '--help']) == 0\n"
        "bad = {'torch', 'numpy', 'transformers', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: halfstep") == len(COMMANDS) + 1


def test_evaluate_counts_bytes_of_any_text(corpus, tmp_path, halfstep):
    path, other = tmp_path / "r", tmp_path / "other.txt"
    words = ["train", *SMALL, "--data", corpus, "--max-steps", 2, "--output-dir", path]
    assert halfstep(*words).returncode == 0
    other.write_text("the lazy dog box over a fox.\n" * 40)
    done = halfstep("evaluate", "--run", path, "--json", "--precision", "fp32", "--data", other)
    found = json.loads(done.stdout)
    assert (found["precision"], found["tokens"]) == ("fp32", 40 * 29 - 1)  # all but the first
    # bytes: a nat per token is a nat per byte
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / 0.693147, rel=1e-4)


@pytest.fixture
def in_forward(monkeypatch):
    """Does something in a run's n-th forward, with its loss."""

    def plant(number, act):
        loss_sum, calls = GPT.loss_sum, []

        def planted(self, batch):
            total, count = loss_sum(self, batch)
            calls.append(0)
            return (act(total) if len(calls) == number else total), count

        monkeypatch.setattr(GPT, "loss_sum", planted)

    return plant


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_leaves_with_4(
    corpus, tmp_path, number, halfstep, in_forward
):
    path = tmp_path / "r"

    def interrupt(total):
        os.kill(os.getpid(), number)
        return total

    in_forward(5, interrupt)
    done = halfstep("train", *SMALL, "--data", corpus, "--max-steps", 1_000_000, "--eval-every", 0,
                    "--save-every", 0, "--output-dir", path)  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert f"stopped by {number.name}" in done.stdout
    assert load_checkpoint(list_checkpoints(path / "checkpoints")[-1]).state["step"] == 5
    more = halfstep("train", "--resume", "--output-dir", path, "--max-steps", 8)
    assert more.returncode == 0, more.stderr
    steps = [json.loads(x)["step"] for x in (path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))
    assert "max_steps = 8" in (path / "config.toml").read_text()
