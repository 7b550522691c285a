"""Refusals and faults of real runs on several ranks; minutes long."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import time

import pytest
from tests import faults
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
TIMEOUT = 10  # seconds


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
    run = Run(["--nproc", 2, *words])
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
    code, _, err = ranks(shlex.split(re.search("try: halfstep train (.*--nproc 2)$", out)[1]))
    assert code == 0, err
    one = references("--grad-accum", "2", steps=LONG, save=0)
    assert numbers(path) == numbers(one)
    assert_same_state(path, one)


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
    assert err.count(f"run.output_dir={path} holds a run already") == 1  # one rank says it
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


# Python runs it before it runs halfstep: one rank stops, or waits for ever, where it is called.
HALTS = """
import os, signal, sys, time
if os.environ.get("RANK") == "{rank}":
    import halfstep.trainer.run, halfstep.trainer.session, halfstep.trainer.tasks.text
    from halfstep.distributed.world import World
    owner, real, left = {owner}, {owner}.{name}, [{times}]
    def halted(*given, **more):
        left[0] -= 1
        if left[0] == 0:
            print("HALTED", time.time(), file=sys.stderr, flush=True)
            {how}
        return real(*given, **more)
    owner.{name} = halted
"""
STOPS, HANGS = "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(10_000)"


@pytest.mark.parametrize(("rank", "place", "times", "how"), [
    (0, "halfstep.trainer.tasks.text.prepare", 1, STOPS),
    (1, "halfstep.trainer.tasks.text.prepare", 1, HANGS),
    (0, "halfstep.precision.step.Precision.step", 5, STOPS),
    (1, "halfstep.precision.step.Precision.step", 5, HANGS),
    (1, "halfstep.trainer.session.Session.evaluate", 2, STOPS),
    (0, "halfstep.trainer.checkpoint.write_shards", 2, STOPS),
    (0, "halfstep.trainer.checkpoint.write_shards", 2, HANGS),
    (1, "halfstep.trainer.run.load_checkpoint", 1, STOPS),
    (0, "halfstep.trainer.run.finish_run", 1, STOPS),
    (1, "halfstep.distributed.world.World.close", 1, STOPS),
])  # fmt: skip
def test_a_rank_that_stops_or_hangs_in_any_phase_ends_the_run_in_time(
    corpus, tmp_path, references, rank, place, times, how
):
    owner, _, name = place.rpartition(".")
    text = HALTS.format(rank=rank, owner=owner, name=name, times=times, how=how)
    (tmp_path / "sitecustomize.py").write_text(text)
    path = tmp_path / "r"
    words = [*tiny(corpus, path), "--quiet"]
    if name == "load_checkpoint":
        shutil.copytree(references(), path)
        words = ["--resume", "--output-dir", path, "--max-steps", 20, "--quiet"]
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = Run(["--nproc", 2, *words, "--run.rank_timeout", TIMEOUT], PYTHONPATH=search)
    code, out, err = run.end()
    (halted,) = [line.split()[1] for line in err.splitlines() if line.startswith("HALTED")]
    assert time.time() - float(halted) < 2 * TIMEOUT + 15, err  # on a loaded machine
    assert (code, out if name != "close" else "") == (1, ""), err
    assert "halfstep: error: rank " in err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_few_mixed_faults_change_nothing(corpus, tmp_path, ranks):
    """As many as `make test-faults FAULTS=200` asks for are nightly."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert Run(["--nproc", ranks, *faults.words_of(whole, corpus)]).end()[0] == 0
    chance = random.Random(os.environ.get("HALFSTEP_TEST_SEED", "4"))
    happened, found = faults.survive(hurt, corpus, ranks, chance)
    assert happened
    assert found == faults.digest(whole / "checkpoints")
