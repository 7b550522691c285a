"""Refusals and faults of real runs on several ranks; minutes long."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time

import pytest
from tests.cli.ranks import (
    Run,
    alive,
    alone,
    assert_same_state,
    await_that,
    numbers,
    ranks,
    steps_of,
    tiny,
)

from halfstep.trainer.checkpoint import list_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]

LONG = 300  # steps; some seconds
KILLS = 20
TORCHS_PATIENCE = 30  # seconds that torchrun's agent gives a rank to end after SIGTERM


@pytest.fixture(scope="module")
def references(corpus, tmp_path_factory):
    """Uninterrupted runs of one process, each made once."""
    folder = tmp_path_factory.mktemp("references")
    made = {}

    def reference(*more, **shape):
        key = (*more, *shape.items())
        if key not in made:
            path = folder / str(len(made))
            with pytest.MonkeyPatch.context() as patch:
                alone([*tiny(corpus, path, **shape), *more], patch)
            made[key] = path
        return made[key]

    return reference


@pytest.mark.parametrize("receivers", ["launcher", "all", "one rank", "all, ranks first"])
def test_sigterm_saves_and_the_run_goes_on_bit_for_bit(corpus, tmp_path, references, receivers):
    path = tmp_path / "r"
    words = tiny(corpus, path, steps=LONG, save=0)
    run = Run(["--nproc", 2, *words, "--quiet"])
    run.await_step(path, 30)
    found = run.ranks()
    everyone = {
        "launcher": [run.process.pid],
        "all": [run.process.pid, *found.values()],
        "all, ranks first": [*found.values(), run.process.pid],
        "one rank": [found[1]],
    }
    start = time.monotonic()
    for pid in everyone[receivers]:
        os.kill(pid, signal.SIGTERM)
    code, out, err = run.end()
    assert time.monotonic() - start < 20
    assert code == (4 if receivers == "one rank" else 128 + signal.SIGTERM)
    assert "stopped by SIGTERM" in out
    step = steps_of(path)
    assert 30 <= step < LONG
    assert [p.name for p in (path / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    code, _, err = ranks(["--nproc", 2, "--resume", "--output-dir", path, "--quiet"])
    assert code == 0, err
    one = references("--grad-accum", "2", steps=LONG, save=0)
    assert numbers(path) == numbers(one)
    assert_same_state(path, one)


def test_twenty_kills_at_random_times_change_nothing(corpus, tmp_path, references):
    chance = random.Random(os.environ.get("HALFSTEP_TEST_SEED", "4"))
    reference = references("--grad-accum", "2", steps=LONG, save=10)
    killed, runs = 0, 0
    while killed < KILLS:
        runs += 1
        path = tmp_path / str(runs)
        words = [*tiny(corpus, path, steps=LONG, save=10), "--keep", 2, "--quiet"]
        run = Run(["--nproc", 2, *words, "--", "--max-restarts", 9])
        kills, first = 0, set()
        while kills < 5 and killed < KILLS and run.process.poll() is None:
            now = run.ranks()
            if len(now) < 2 or set(now.values()) & first:  # the attempt before is not over yet
                time.sleep(0.01)
                continue
            first = set(now.values())
            # from start-up, through reading the checkpoint and training, to the end
            patience = chance.choice((chance.uniform(0, 4), chance.uniform(4, 9), 60))
            goal = min(steps_of(path) + chance.randrange(1, 150), LONG)
            since = time.monotonic()
            while time.monotonic() - since < patience and run.process.poll() is None:
                if patience == 60 and steps_of(path) >= goal:
                    break
                time.sleep(0.005)
            rank = chance.randrange(2)
            if alive(now[rank]):
                os.kill(now[rank], signal.SIGKILL)
                killed, kills = killed + 1, kills + 1
        code, out, err = run.end()
        assert code == 0, err
        assert f"{path}: step {LONG}" in out
        assert numbers(path) == numbers(reference)
        assert_same_state(path, reference)
        assert len(list((path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("parallel", ["shard=2", "tensor=2", "data=2,tensor=2"])
def test_a_killed_rank_starts_again_in_any_layout(corpus, tmp_path, parallel):
    count = 4 if "," in parallel else 2
    for name in ("whole", "killed"):
        words = [*tiny(corpus, tmp_path / name, steps=60), "--parallel", parallel, "--quiet"]
        run = Run(["--nproc", count, *words, "--model.dropout", 0.1, "--", "--max-restarts", 3])
        if name == "killed":
            run.await_step(tmp_path / name, 20)
            os.kill(run.ranks()[count - 1], signal.SIGKILL)
        code, _, err = run.end()
        assert code == 0, err
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "killed")
    assert_same_state(tmp_path / "whole", tmp_path / "killed")


def test_a_restart_does_not_go_on_with_what_another_run_left(corpus, tmp_path, references):
    path = tmp_path / "r"
    shutil.copytree(references(), path)
    run = Run(["--nproc", 2, *tiny(corpus, path, steps=20), "--", "--max-restarts", 3])
    await_that(lambda: len(run.ranks()) == 2, run.process)
    os.kill(run.ranks()[1], signal.SIGKILL)  # before the folder is looked at
    code, out, err = run.end()
    assert code in (1, 2)
    assert out == ""
    assert f"run.output_dir={path} holds a run already" in err
    assert steps_of(path) == 12


def test_ranks_of_a_killed_launcher_save_and_end(corpus, tmp_path):
    path = tmp_path / "r"
    run = Run(["--nproc", 2, *tiny(corpus, path, steps=100_000, save=0), "--quiet"])
    run.await_step(path, 5)
    found = run.ranks()
    run.process.kill()
    run.end()  # which waits for the ranks, as they hold the pipes
    await_end = time.monotonic() + 10
    while any(map(alive, found.values())) and time.monotonic() < await_end:
        time.sleep(0.05)
    assert not any(map(alive, found.values()))
    assert len(list_checkpoints(path / "checkpoints")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_run_in_time(corpus, tmp_path, rank):
    path = tmp_path / "r"
    words = [*tiny(corpus, path, steps=100_000), "--run.rank_timeout", 5, "--quiet"]
    run = Run(["--nproc", 2, *words])
    run.await_step(path, 10)
    start = time.monotonic()
    found = run.ranks()
    os.kill(found[rank], signal.SIGSTOP)
    code, out, _err = run.end()
    assert time.monotonic() - start < 5 + TORCHS_PATIENCE + 15
    assert (code, out) == (1, "")
    assert not any(map(alive, found.values()))
