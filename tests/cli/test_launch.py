"""``halfstep train --nproc``: its grammar, its exit codes, its lines, and what happens to ranks.

The ranks are tests/distributed/worker_script.py, which uses World as the trainer does; signals and
kills of real runs: test_train_ranks.py and test_faults.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from tests.cli.ranks import RANK_VARIABLES, TORCHRUN, Run, alive, await_that

from halfstep.cli import agent, launch, outcome
from halfstep.cli.grammar import read_words
from halfstep.cli.main import main
from halfstep.errors import ConfigError, PeerError

SCRIPT = Path(__file__).parents[1] / "distributed" / "worker_script.py"
COMMAND = [sys.executable, str(SCRIPT), "train"]


def test_options_of_torchrun_stand_behind_two_dashes():
    words = ["train", "--data", "a", "b", "--nproc", "2", "--", "--max-restarts", "3", "--", "x"]
    _, request = read_words(words)
    assert (request.words, request.launcher) == (words[:6], ["--max-restarts", "3", "--", "x"])
    assert request.start.nproc == 2
    assert read_words(["formats", "--", "-1"])[1].values == ("-1",)


def test_ranks_get_the_command_without_nproc(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--nproc=2", "--data", "a b", "$HOME", "--optimizer.eps", "-1e-8", "--quiet"]
    assert launch._worker_arguments(words) == [
        "-P", "-u", "-m", "halfstep", "train", "--data", "a b", "$$HOME", "--optimizer.eps",
        "-1e-8", "--quiet",
    ]  # fmt: skip
    found = launch._worker_arguments(["train", "--nproc", "4", "--seed", "1"])
    assert found[4:] == ["train", "--seed", "1"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as python -m does
    assert launch._worker_arguments(["train"])[0] == "-u"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "0"], "--nproc 0; allowed: integers >= 1"),
        (["--nproc", "-3"], "--nproc -3"),
        (["--nproc", "two"], "--nproc: 'two'; allowed: an integer"),
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
        (["--nproc", "2", "--", "--nnodes", "many"], "after --: "),
        (["--nproc", "2", "--", "--nnodes", "2", "--standalone"], "--standalone is one machine"),
        (["--nproc", "2", "--", "--nnodes", "1:2"], "needs --rdzv-backend c10d"),
        (["--nproc", "2", "--", "--rdzv-backend", "smoke", "--rdzv-endpoint", "a:1"], "smoke"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(words, message, capsys, monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    code = main(["train", *words])
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


def ended(rank, code, message, *, follows=False, after=0.0):
    return outcome.Outcome(rank, code, message, follows, 100.0 + after)


LOST = "lost contact with another rank (x); its own message tells why"
GO_ON = "; go on from the last checkpoint with --resume, or let -- --max-restarts N do"


@pytest.mark.parametrize(
    ("causes", "attempt", "code", "lines"),
    [
        ([ended(0, 2, "no GPU"), ended(1, 2, "no GPU")], (1, 1), 2, ["no GPU"]),
        ([ended(0, 1, LOST, follows=True), ended(1, 3, "a", after=1)], (1, 4), 3, ["rank 1: a"]),
        (
            [ended(1, 1, "this"), ended(0, 1, "that", after=1)], (1, 1), 1,
            [f"rank 1: this{GO_ON}", f"rank 0: that{GO_ON}"],
        ),
        (
            [ended(1, 1, " was killed by SIGKILL"), ended(0, 1, LOST, follows=True)], (1, 4), 1,
            ["rank 1 was killed by SIGKILL (attempt 1 of 4); starting again"],
        ),
        ([ended(1, 1, " was killed by SIGKILL")], (4, 4), 1,
         ["rank 1 was killed by SIGKILL (attempt 4 of 4)"]),
        (
            [ended(0, 1, LOST, follows=True), ended(1, 1, " was killed by SIGKILL", after=30)],
            (0, 0), 1, ["rank 1 did not answer, and was killed"],
        ),
        ([ended(0, 1, LOST, follows=True), ended(1, 1, LOST, follows=True)], (0, 0), 1, [LOST]),
        ([ended(0, 4, ""), ended(1, 1, "disk", after=1)], (1, 1), 1, [f"rank 1: disk{GO_ON}"]),
        ([ended(0, 4, "")], (1, 1), 4, []),
    ],
)  # fmt: skip
def test_each_cause_is_told_once_and_the_first_decides_the_exit_code(
    causes, attempt, code, lines, capsys
):
    assert agent.report(causes, 2, *attempt) == code
    assert capsys.readouterr().err.splitlines() == [f"halfstep: error: {line}" for line in lines]


# What follows starts launchers.


class Launched(Run):
    """A launcher of worker scripts, and their folder."""

    def __init__(self, folder, words, *, job="", steps=15, command=COMMAND):
        self.folder = folder
        super().__init__(
            words, command=command, HALFSTEP_TEST_FOLDER=str(folder), HALFSTEP_TEST_JOB=job,
            HALFSTEP_TEST_STEPS=str(steps), TMPDIR=str(folder),
        )  # fmt: skip

    def await_step(self, step):
        """Wait until rank 0 has taken so many steps."""
        file = self.folder / "steps0"
        await_that(lambda: file.exists() and file.read_text().count("\n") >= step, self.process)

    def pid(self, rank):
        return int((self.folder / f"pid{rank}").read_text())


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
    if code == 1:  # the others are final
        line += GO_ON
    end = Launched(tmp_path, ["--nproc", "2"], job=job).end()
    assert end == (code, "", f"halfstep: error: {line}\n")


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
def test_two_machines_meet_by_c10d(tmp_path):  # statically: test_faults.py
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--nproc", "1", "--", "--nnodes", "2", "--max-restarts", "3", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test", "--local-addr",
             "127.0.0.1"]  # fmt: skip
    runs = [Launched(tmp_path, words, steps=60) for _ in range(2)]
    runs[0].await_step(5)
    os.kill(runs[0].pid(1), signal.SIGKILL)
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "DONE steps=60" in "".join(out for _, out, _ in ends)
    assert "rank 1 was killed by SIGKILL" in "".join(err for _, _, err in ends)


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
    command = [*TORCHRUN[:-3], str(SCRIPT), "train"]
    code, _, err = Launched(tmp_path, [], job="refuse rank 1", command=command).end()
    assert code == 1
    assert "halfstep: error: rank 1: no GPU on this rank\n" in err
