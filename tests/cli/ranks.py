"""Runs of the real trainer on several ranks, started, watched and hurt through its command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tests.reference.adam import EPS, assert_near

from halfstep.cli import train
from halfstep.cli.main import main
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
LAUNCH = [sys.executable, "-m", "halfstep", "train"]
PF_EXITING = 0x4  # Source: linux/sched.h
SECONDS = 240  # a run that takes longer hangs
TIMES = {"tokens_per_second", "peak_memory_bytes", "grad_norm"}


def tiny(corpus, path, *, precision="fp32", steps=12, save=4):
    """The words of a tiny run; a step takes milliseconds."""
    return [
        "--config", "gpt-tiny", "--tokenizer", "bytes", "--device", "cpu", "--data", str(corpus),
        "--model.n_layer", "1", "--model.n_embd", "32", "--model.n_head", "2",
        "--model.block_size", "32", "--batch-size", "4", "--schedule.warmup_steps", "2",
        "--run.eval_batches", "2", "--eval-every", "4", "--keep", "9", "--run.rank_timeout", "60",
        "--precision", precision, "--max-steps", str(steps), "--save-every", str(save),
        "--optimizer.eps", str(EPS), "--output-dir", str(path),
    ]  # fmt: skip


class Run:
    """A launcher as a process of its own, and its ranks."""

    def __init__(self, words, *, command=LAUNCH, cwd=None, **environment):
        keep = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        self.process = subprocess.Popen(
            [*command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=keep | {"OMP_NUM_THREADS": "1"} | environment, cwd=cwd,
        )  # fmt: skip

    def await_step(self, path, step):
        """Wait until rank 0 has written so many steps."""
        await_that(lambda: steps_of(path) >= step, self.process)

    def ranks(self):
        """Rank to process id, of those that live."""
        found = {}
        listed = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        try:
            for pid in map(int, Path(listed).read_text().split()):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                given = [v for v in variables if v.startswith(b"RANK=")]
                if given and alive(pid):
                    found[int(given[0][5:])] = pid
        except OSError:  # one has just ended
            pass
        return found

    def end(self, timeout=SECONDS):
        """Exit code, stdout and stderr; the ranks are gone then."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in self.ranks().values():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            raise AssertionError(f"the run hangs: {self.process.communicate()}") from None
        return self.process.returncode, out, err


def ranks(words, **options):
    """A whole run: exit code, stdout and stderr."""
    return Run(words, **options).end()


def alone(words, monkeypatch):
    """The same command as one process: this one, without the run's own measurements."""
    monkeypatch.setattr(train, "keep_freed_memory", lambda **_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(["train", "--quiet", *map(str, words)]) == 0
    finally:
        torch.set_num_threads(threads)


def await_that(happens, process):
    """Wait while the process lives."""
    end = time.monotonic() + SECONDS
    while not happens():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run does not come so far"
        time.sleep(0.01)


def alive(pid):
    """Whether a process runs; zombies, and those whose exit code is settled, are not counted."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and not int(fields[6]) & PF_EXITING


def steps_of(path):
    """How many steps rank 0 has written."""
    file = Path(path) / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def numbers(path):
    """What metrics.jsonl says, without times and what depends on the layout."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in TIMES} for x in lines]


def losses(path):
    """Training losses, step by step, and validation losses."""
    found = numbers(path)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return [line["loss"] for line in found] + [x["val_loss"] for x in found if "val_loss" in x]


def state(path):
    """The newest checkpoint, whole."""
    return load_checkpoint(list_checkpoints(path / "checkpoints")[-1])


def assert_same_state(a, b):
    """Weights and optimizer, bit for bit, and the counts."""
    one, other = state(a), state(b)
    for mine, theirs in ((one.weights, other.weights), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name
    assert one.state["precision"] == other.state["precision"]
    assert (one.state["step"], one.state["tokens"]) == (other.state["step"], other.state["tokens"])


def assert_near_state(a, b):
    """Weights of fp32 runs that took their sums in another order."""
    rates = [line["learning_rate"] for line in numbers(b)]
    assert_near(state(a).weights, state(b).weights, rates)


def cut_to(path, target, step):
    """A copy of a run as it was when a checkpoint had been written."""
    shutil.copytree(path, target)
    for checkpoint in list_checkpoints(target / "checkpoints"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return target


def assert_one_line(err, *words):
    """One complaint and nothing else."""
    assert err.startswith("halfstep: error: "), err
    assert len(err.splitlines()) == 1, err
    for word in words:
        assert str(word) in err, err


def assert_refused(done, *words):
    """A command's exit code, stdout and stderr are those of a refusal in one line."""
    code, out, err = done
    assert (code, out) == (2, ""), err
    assert_one_line(err, *words)
