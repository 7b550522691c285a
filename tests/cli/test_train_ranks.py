"""The real trainer on two ranks, through its command line; long ones are in test_faults.py."""

from __future__ import annotations

import os
import signal

import pytest
from tests.cli.ranks import (
    TORCHRUN,
    Run,
    alone,
    assert_near_state,
    assert_one_line,
    assert_same_state,
    cut_to,
    losses,
    numbers,
    ranks,
    steps_of,
    tiny,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """A finished run of two ranks, and what it printed."""
    path = tmp_path_factory.mktemp("two") / "r"
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    return path, ranks(["--nproc", 2, *tiny(corpus, path)], HALFSTEP_CACHE=cache)


def test_two_ranks_are_two_micro_batches(two, corpus, tmp_path, monkeypatch):
    path, (code, out, err) = two
    assert code == 0, err
    alone([*tiny(corpus, tmp_path / "one"), "--grad-accum", "2"], monkeypatch)
    assert losses(path) == losses(tmp_path / "one")
    assert_same_state(path, tmp_path / "one")

    assert len(out.splitlines()) == 1
    assert f"{path}: step 12; validation loss" in out
    assert "each rank sent 88 kB of gradients and parameters a step (in fp32 88 kB)" in out
    assert err.count("parameters, ") == 1
    assert "2 ranks as data=2" in err
    assert err.count("step 12: validation loss") == 1
    assert all(line.startswith(("gpt-tiny fp32", "step ")) for line in err.splitlines()), err
    assert {p.name for p in path.iterdir()} == {
        "config.toml", "env.json", "metrics.jsonl", "tokenizer", "checkpoints", "run.lock",
    }  # fmt: skip
    assert {p.name for p in (path / "checkpoints").iterdir()} == {
        "step-00000004", "step-00000008", "step-00000012",
    }  # fmt: skip


@pytest.mark.slow
def test_torchrun_is_the_same(two, corpus, tmp_path):
    path, _ = two
    code, out, err = ranks([*tiny(corpus, tmp_path / "r"), "--quiet"], command=TORCHRUN)
    assert code == 0, err
    assert len(out.splitlines()) == 1
    assert "halfstep" not in err
    assert numbers(tmp_path / "r") == numbers(path)
    assert_same_state(tmp_path / "r", path)


def test_another_layout_goes_on(two, tmp_path, monkeypatch):
    path, _ = two
    again = cut_to(path, tmp_path / "r", 4)
    words = ["--resume", "--output-dir", again]
    run = ranks(["--nproc", 2, *words, "--parallel", "tensor=2", "--quiet"])
    assert run[0] == 0, run[2]
    assert losses(again) == pytest.approx(losses(path), rel=1e-5)
    assert_near_state(again, path)
    cut_to(again, tmp_path / "one", 8)
    alone(["--resume", "--output-dir", tmp_path / "one", "--parallel", ""], monkeypatch)
    assert losses(tmp_path / "one") == pytest.approx(losses(path), rel=1e-5)
    assert_near_state(tmp_path / "one", path)


def test_a_folder_that_cannot_be_made_ends_all_ranks(corpus, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    run = ranks(["--nproc", 2, *tiny(corpus, file / "r"), "--quiet"])
    assert run[:2] == (2, "")
    assert_one_line(run[2], f"run folder {file / 'r'} cannot be written")


def test_sigterm_to_all_processes_saves(corpus, tmp_path):
    path = tmp_path / "r"
    run = Run(["--nproc", 2, *tiny(corpus, path, steps=100_000, save=0), "--quiet"])
    run.await_step(path, 3)
    for pid in (*run.ranks().values(), run.process.pid):  # as a service manager does
        os.kill(pid, signal.SIGTERM)
    code, out, err = run.end()
    assert (code, err) == (4, "")
    assert "stopped by SIGTERM" in out
    assert [p.name for p in (path / "checkpoints").iterdir()] == [f"step-{steps_of(path):08d}"]


def test_a_killed_rank_starts_again(two, corpus, tmp_path):
    path, _ = two
    again = tmp_path / "r"
    run = Run(["--nproc", 2, *tiny(corpus, again), "--quiet", "--", "--max-restarts", 3])
    run.await_step(again, 5)
    os.kill(run.ranks()[1], signal.SIGKILL)
    code, out, err = run.end()
    assert code == 0, err
    assert "step 12; validation loss" in out
    assert_one_line(err, "rank 1 was killed by SIGKILL (attempt 1 of 4); starting again")
    assert numbers(again) == numbers(path)
    assert_same_state(again, path)


# Python runs it before it runs halfstep. Rank 1 of the first attempt dies as its part of the last
# checkpoint is about to be written, when rank 0 has nothing left to do but to wait for it.
DIES_SAVING = """
import os, signal
if (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == ("1", "0"):
    from halfstep.trainer.checkpoint import saver
    real = saver.save_part
    def save_part(folder, step, *more):
        if step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(folder, step, *more)
    saver.save_part = save_part
"""


def test_a_rank_killed_in_the_last_save_is_not_waited_for(two, corpus, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DIES_SAVING)
    words = ["--nproc", 2, *tiny(corpus, tmp_path / "r"), "--quiet", "--", "--max-restarts", 3]
    search = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    code, out, err = ranks(words, PYTHONPATH=os.pathsep.join(search))
    assert code == 0, err
    assert "step 12; validation loss" in out
    # and no line that rank 0 did not answer, which the launcher says after half a minute
    assert_one_line(err, "rank 1 was killed by SIGKILL (attempt 1 of 4); starting again")
    assert numbers(tmp_path / "r") == numbers(two[0])
    assert_same_state(tmp_path / "r", two[0])


def test_a_guard_stops_all_ranks_with_one_message(corpus, tmp_path):
    words = [*tiny(corpus, tmp_path / "r", save=1), "--learning-rate", "1e30", "--quiet"]
    code, out, err = ranks(["--nproc", 2, *words, "--schedule.warmup_steps", 0])
    assert (code, out) == (3, "")
    assert_one_line(err, "step 2: the loss is ", "the last checkpoint is ", "step-00000001")
