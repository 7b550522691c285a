"""``halfstep train --nproc``: its grammar, its exit codes, its lines, and what happens to ranks.

The ranks are tests/distributed/worker_script.py, which uses World as the trainer does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep.cli import launch, outcome
from halfstep.cli.grammar import build_parser, split_launcher, split_overrides
from halfstep.cli.main import main
from halfstep.errors import ConfigError, PeerError

SCRIPT = Path(__file__).parents[1] / "distributed" / "worker_script.py"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def parsed(*words):
    mine, launcher = split_launcher(words)
    mine, overrides = split_overrides(mine)
    arguments = build_parser("0").parse_args(mine)
    arguments.words, arguments.overrides, arguments.launcher = mine, overrides, launcher or []
    return arguments


def test_options_of_torchrun_stand_behind_two_dashes():
    words = ["train", "--data", "a", "b", "--nproc", "2", "--", "--max-restarts", "3", "--", "x"]
    assert split_launcher(words) == (words[:6], ["--max-restarts", "3", "--", "x"])
    assert split_launcher(["train"]) == (["train"], None)
    assert split_launcher(["train", "--"]) == (["train"], [])
    assert split_launcher(["formats", "--", "-1"]) == (["formats", "--", "-1"], None)


def test_ranks_get_the_command_without_nproc(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = parsed(
        "train", "--nproc=2", "--data", "a b", "$HOME", "--optimizer.eps", "-1e-8",
        "--schedule.warmup-steps=3", "--parallel", "data=2", "--quiet", "--", "--max-restarts", "1",
    )  # fmt: skip
    assert launch._worker_arguments(arguments) == [
        "-P", "-u", "-m", "halfstep", "train", "--data", "a b", "$$HOME", "--parallel", "data=2",
        "--quiet", "--optimizer.eps=-1e-8", "--schedule.warmup_steps=3",
    ]  # fmt: skip
    assert getattr(arguments, "run.parallel") == "data=2"
    arguments = parsed("train", "--nproc", "4", "--seed", "1")
    assert launch._worker_arguments(arguments)[4:] == ["train", "--seed", "1"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as python -m does
    assert launch._worker_arguments(arguments)[0] == "-u"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "0"], "--nproc 0; allowed: integers >= 1"),
        (["--nproc", "-3"], "--nproc -3"),
        (["--nproc", "two"], "invalid int value"),
        (["--seed", "3", "--", "--max-restarts", "1"], "needs --nproc N before it"),
        (["--"], "needs --nproc N before it"),
        (["--nproc", "2", "--", "--max-restart", "soon"], "invalid int value: 'soon'"),
        (["--nproc", "2", "--", "--no-such"], "unrecognized arguments: --no-such"),
        (["--nproc", "2", "--", "--max-restarts"], "invalid int value: '<nothing>'"),
        (["--nproc", "2", "--", "--seed", "3"], "those of train stand before --"),
        (["--nproc", "2", "--", "seed"], "'seed' is not an option of torchrun"),
        (["--nproc", "2", "--", "--nproc-per-node", "3"], "say it as --nproc N"),
        (["--nproc", "2", "--", "-m"], "--module; ranks run halfstep train"),
        (["--nproc", "2", "--", "--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--nproc", "2", "--", "--nnodes", "many"], "--nnodes many; allowed: N, or MIN:MAX"),
        (["--nproc", "2", "--", "--nnodes", "2", "--standalone"], "--standalone is one machine"),
        (["--nproc", "2", "--", "--nnodes", "1:2"], "needs --rdzv-backend c10d"),
        (["--nproc", "2", "--", "--rdzv-backend", "smoke", "--rdzv-endpoint", "a:1"], "smoke"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(words, message, capsys, monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    try:
        code = main(["train", *words])
    except SystemExit as end:
        code = end.code
    text = capsys.readouterr().err
    assert code == 2, text
    assert message in text
    assert text.startswith("halfstep: error: ")
    assert len(text.splitlines()) == 1
    assert dict(os.environ) == before


def test_a_rank_launches_no_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--nproc", "2"]) == 2
    assert "RANK is set" in capsys.readouterr().err


def test_ranks_tell_their_launcher_or_else_the_user(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(outcome.FOLDER, raising=False)
    outcome.tell(1, "this  one\nfails")
    outcome.tell(0)
    assert capsys.readouterr().err == "halfstep: error: rank 1: this one fails\n"

    monkeypatch.setenv(outcome.FOLDER, str(tmp_path))
    outcome.tell(2, "refused", ConfigError("refused"))
    monkeypatch.setenv("RANK", "0")
    outcome.tell(1, "rank 1 failed", PeerError("rank 1 failed"))
    said = outcome.read_outcomes(tmp_path)
    assert [(o.rank, o.code, o.message, o.follows) for o in said.values()] == [
        (0, 1, "rank 1 failed", True),
        (1, 2, "refused", False),
    ]
    assert capsys.readouterr().err == ""
    outcome.forget_outcomes(tmp_path)
    assert outcome.read_outcomes(tmp_path) == {}

    monkeypatch.setenv(outcome.FOLDER, str(tmp_path / "gone"))
    outcome.tell(1, "fails")
    assert capsys.readouterr().err == "halfstep: error: rank 0: fails\n"


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection "
        "reset by peer. This is typically caused by a remote worker hanging",
        "Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "[Rank 0] NCCL timeout: watchdog",
    ],
)
def test_a_lost_rank_is_no_error_of_this_one(text, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    message, code = outcome.describe(RuntimeError(text))
    assert message.startswith("lost contact with another rank (")
    assert "typically" not in message
    assert code == 1
    assert outcome.describe(ValueError(text))[0].startswith("unexpected ValueError")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert outcome.describe(RuntimeError(text))[0].startswith("unexpected RuntimeError")


# What follows starts launchers.


class Launched:
    """A launcher, its ranks' folder, and what it printed."""

    def __init__(self, folder, words, *, job="", steps=15, timeout=30):
        self.folder = folder
        keep = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        mine = {"HALFSTEP_TEST_FOLDER": str(folder), "HALFSTEP_TEST_JOB": job,
                "HALFSTEP_TEST_STEPS": str(steps), "HALFSTEP_TEST_TIMEOUT": str(timeout),
                "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "train", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=keep | mine,
        )  # fmt: skip

    def await_step(self, step):
        """Wait until rank 0 has taken so many steps."""
        file = self.folder / "steps0"
        end = time.monotonic() + 60
        while not file.exists() or len(file.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < end, "the ranks do not begin"
            time.sleep(0.02)

    def pid(self, rank):
        return int((self.folder / f"pid{rank}").read_text())

    def end(self):
        """Exit code, stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.distributed
def test_two_ranks_end_well_and_quietly(tmp_path):
    code, out, err = Launched(tmp_path, ["--nproc", "2"]).end()
    assert (code, err) == (0, "")
    assert out == "DONE steps=15 first=0 attempt=0 run=run-of-attempt-0\n"


@pytest.mark.distributed
def test_what_all_ranks_refuse_is_said_once_and_not_tried_again(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2", "--", "--max-restarts", "5"], job="refuse")
    assert run.end() == (2, "", "halfstep: error: run.max_steps=-1; allowed: integers >= 1\n")


@pytest.mark.distributed
def test_sigterm_to_the_launcher_saves(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2"], steps=2000)
    run.await_step(3)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert (code, err) == (4, "")
    assert out.startswith("SAVED step=")


@pytest.mark.distributed
def test_a_run_goes_on_after_kill_9_of_rank_1(tmp_path):
    killed_goes_on(tmp_path, 1)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(5))
def test_a_run_goes_on_after_kill_9_of_rank_0(tmp_path, turn):
    killed_goes_on(tmp_path, 0)


def killed_goes_on(folder, rank):
    run = Launched(folder, ["--nproc", "2", "--", "--max-restarts", "3"], steps=60)
    run.await_step(5)
    os.kill(run.pid(rank), signal.SIGKILL)
    code, out, err = run.end()
    assert code == 0, err
    assert "DONE steps=60" in out
    assert "run=run-of-attempt-0" in out
    assert "first=0 " not in out
    assert f"rank {rank} was killed by SIGKILL" in err
    assert "(attempt 1 of 4); starting again" in err


# Job -> exit code, the one line.
FAILURES = {
    "refuse rank 1": (2, "rank 1: no GPU on this rank"),
    "guard": (3, "step 3: the loss is NaN"),
    "crash rank 1": (1, "rank 1: unexpected ValueError: this one; HALFSTEP_DEBUG=1 shows where"),
    "exit rank 1": (1, "rank 1 ended with exit code 7 and said nothing"),
    "crash main_only": (
        1, "rank 0: unexpected ZeroDivisionError: division by zero; HALFSTEP_DEBUG=1 shows where",
    ),
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("job", FAILURES)
def test_the_first_cause_decides_the_exit_code(tmp_path, job):
    code, line = FAILURES[job]
    assert Launched(tmp_path, ["--nproc", "2"], job=job).end() == (
        code, "", f"halfstep: error: {line}\n",
    )  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2"], steps=2000)
    run.await_step(3)
    os.kill(run.pid(0), signal.SIGKILL)
    assert run.end() == (1, "", "halfstep: error: rank 0 was killed by SIGKILL\n")


@pytest.mark.distributed
@pytest.mark.slow
def test_one_rank_by_plain_means(tmp_path):
    code, out, err = Launched(tmp_path, ["--nproc", "1"]).end()
    assert (code, err) == (0, "")
    assert out == "DONE steps=15 first=0 attempt=0 run=run-of-attempt-0\n"


@pytest.mark.distributed
@pytest.mark.slow
def test_sigterm_to_one_rank_saves_and_ends_all(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2", "--", "--max-restarts", "3"], steps=2000)
    run.await_step(3)
    os.kill(run.pid(1), signal.SIGTERM)
    code, out, err = run.end()
    assert (code, err) == (4, "")
    assert out.startswith("SAVED step=")


@pytest.mark.distributed
@pytest.mark.slow
def test_a_second_signal_acts_at_once(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2"], steps=2000)
    run.await_step(3)
    os.kill(run.pid(1), signal.SIGSTOP)  # so that the first signal cannot be obeyed
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert time.monotonic() - start < 15
    assert code == 128 + signal.SIGINT
    assert "stopped by SIGINT before all ranks had saved" in err
    assert not alive(run.pid(0))
    assert not alive(run.pid(1))


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_save_and_end_when_the_launcher_is_killed(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2"], steps=2000)
    run.await_step(3)
    run.process.kill()
    code, out, _ = run.end()  # which waits for the ranks, as they hold the pipes
    assert code == -signal.SIGKILL
    assert out.startswith("SAVED step=")
    end = time.monotonic() + 10
    while (alive(run.pid(0)) or alive(run.pid(1))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(run.pid(0))
    assert not alive(run.pid(1))


@pytest.mark.distributed
@pytest.mark.slow
def test_a_hung_rank_ends_the_run_within_the_timeout(tmp_path):
    run = Launched(tmp_path, ["--nproc", "2"], steps=2000, timeout=3)
    run.await_step(3)
    start = time.monotonic()
    os.kill(run.pid(1), signal.SIGSTOP)
    assert run.end() == (1, "", "halfstep: error: rank 1 did not answer, and was killed\n")
    assert time.monotonic() - start < 3 + 30 + 15  # the agent waits for 30 s after SIGTERM


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("victim", [None, 0, 1])
def test_two_machines_on_one(tmp_path, backend, victim):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = ["--nproc", "1", "--", "--nnodes", "2", "--max-restarts", "3"]
    if backend == "static":
        common += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        nodes = [["--node-rank", "0"], ["--node-rank", "1"]]
    else:
        common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                   "--rdzv-id", "test", "--local-addr", "127.0.0.1"]  # fmt: skip
        nodes = [[], []]
    steps = 15 if victim is None else 60
    runs = [Launched(tmp_path, [*common, *node], steps=steps) for node in nodes]
    if victim is not None:
        runs[0].await_step(5)
        os.kill(runs[0].pid(victim), signal.SIGKILL)
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    out = "".join(out for _, out, _ in ends)
    assert f"DONE steps={steps}" in out
    if victim is not None:
        assert f"rank {victim} was killed by SIGKILL" in "".join(err for _, _, err in ends)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_refusal_on_one_machine_ends_the_other(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = ["--nproc", "1", "--", "--nnodes", "2", "--max-restarts", "1",
              "--master-addr", "127.0.0.1", "--master-port", str(port)]  # fmt: skip
    runs = [
        Launched(tmp_path, [*common, "--node-rank", str(node)], job="refuse rank 1")
        for node in (0, 1)
    ]
    (zero, _, said), (one, _, cause) = [run.end() for run in runs]
    assert (zero, one) == (1, 2)
    assert cause == "halfstep: error: rank 1: no GPU on this rank\n"
    assert "the run is over, by rank 1: no GPU on this rank" in said


@pytest.mark.distributed
@pytest.mark.slow
def test_under_plain_torchrun_each_rank_says_its_own(tmp_path):
    environment = {"HALFSTEP_TEST_FOLDER": str(tmp_path), "HALFSTEP_TEST_JOB": "refuse rank 1",
                   "TMPDIR": str(tmp_path)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--local-addr", "127.0.0.1", str(SCRIPT), "train"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "halfstep: error: rank 1: no GPU on this rank\n" in done.stderr
