"""``halfstep train --nproc``: its grammar and its exit codes.

Ranks that really run, signals and kills: test_train_ranks.py and test_faults.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from halfstep.cli import launch, main as program
from halfstep.cli.commands import read_words
from halfstep.cli.main import main


def test_options_of_torchrun_stand_behind_two_dashes():
    words = ["train", "--data", "a", "b", "--nproc", "2", "--", "--max-restarts", "3", "--", "x"]
    _, request = read_words(words)
    assert (request.words, request.launcher) == (words[:6], ["--max-restarts", "3", "--", "x"])
    assert request.start.nproc == 2
    assert read_words(["explain", "--", "-1"])[1].policies == ("-1",)


def test_ranks_get_the_command_without_nproc():
    words = ["train", "--nproc=2", "--data", "a b", "$HOME", "--optimizer.eps", "-1e-8", "--quiet"]
    assert launch._without_nproc(words) == [
        "train", "--data", "a b", "$$HOME", "--optimizer.eps", "-1e-8", "--quiet",
    ]  # fmt: skip
    assert launch._without_nproc(["train", "--nproc", "4", "--seed", "1"]) == [
        "train", "--seed", "1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "-3"], "nproc=-3; allowed: integers >= 0"),
        (["--nproc", "two"], "--nproc: 'two'; allowed: an integer"),
        (["--seed", "3", "--", "--max-restarts", "1"], "needs --nproc N before it"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(words, message, capsys):
    code = main(["train", *words])
    text = capsys.readouterr().err
    assert code == 2, text
    assert message in text
    assert text.startswith("halfstep: error: ")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection "
        "reset by peer. This is typically caused by a remote worker hanging",
        "[Rank 0] NCCL timeout: watchdog",
    ],
)
def test_a_lost_rank_is_no_error_of_this_one(text, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    message, code = program.describe(RuntimeError(text))
    assert message.startswith("lost contact with another rank (")
    assert "typically" not in message
    assert code == 1
    assert program.describe(ValueError(text))[0].startswith("unexpected ValueError")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert program.describe(RuntimeError(text))[0].startswith("unexpected RuntimeError")


@pytest.mark.parametrize(
    ("codes", "code"), [((1, 3), 3), ((-15, 1), 1), ((4, 2), 2), ((-9, 4), 4), ((-9, 7), 1)]
)
def test_a_rank_that_fails_decides_the_exit_code(codes, code, monkeypatch):
    def fail(chosen):
        failures = {n: SimpleNamespace(exitcode=one, timestamp=n) for n, one in enumerate(codes)}
        raise ChildFailedError("halfstep", failures)

    monkeypatch.setattr(ChildFailedError, "format_msg", lambda self: "")
    monkeypatch.setattr(launch.torchrun, "run", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["train", "--data", "a", "--nproc", "2"]) == code
