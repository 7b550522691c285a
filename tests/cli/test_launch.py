"""``halfstep train --nproc``: its grammar and its exit codes.

Ranks that really run, signals and kills: test_train_ranks.py and test_faults.py.
"""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from halfstep.cli import launch, main as program
from halfstep.cli.commands import read_words
from halfstep.cli.main import main
from halfstep.errors import ConfigError, PeerError
from halfstep.shown import LAUNCHER
from halfstep.trainer.config.config import load_config
from halfstep.trainer.loop import way_on


def test_options_of_torchrun_stand_behind_two_dashes():
    words = ["train", "--data", "a", "b", "--nproc", "2", "--", "--max-restarts", "3", "--", "x"]
    _, request = read_words(words)
    assert (request.words, request.launcher) == (words[:6], ["--max-restarts", "3", "--", "x"])
    assert request.start.nproc == 2
    assert read_words(["explain", "--", "-1"])[1].policies == ("-1",)


def test_ranks_get_the_command_without_nproc():
    words = ["train", "--nproc=2", "--data", "$HOME", "--eps", "-1e-8", "--nproc", "3"]
    assert " ".join(launch._without_nproc(words)) == "train --data $$HOME --eps -1e-8"


MACHINE = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
MACHINES = MACHINE | {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"}


@pytest.mark.parametrize(
    ("given", "parallel", "ranks"),
    [
        ({}, "data=1", ""),
        ({}, "data=2,shard=2", " --nproc 4"),
        (MACHINE, "", " --nproc 2 -- --max-restarts 3"),
        (MACHINES | {"MASTER_ADDR": "host", "MASTER_PORT": "29"}, "", " --nproc 2 -- --max-restarts"
         " 3 --nnodes 2 --node-rank 1 --master-addr host --master-port 29"),
        (MACHINES | {LAUNCHER: "--nproc 2 -- --tee 3"}, "", " --nproc 2 -- --tee 3"),
    ],
)  # fmt: skip
def test_what_is_typed_to_go_on_starts_as_many_ranks(given, parallel, ranks, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    run = {"parallel": parallel, "output_dir": "a b", "checkpoint_dir": "memory://c"}
    config = load_config("gpt-tiny", [(f"run.{key}", value) for key, value in run.items()])
    assert way_on(config) == f"halfstep train --resume --output-dir 'a b'{ranks}"
    _, request = read_words(shlex.split(way_on(config, False, learning_rate=1e-3))[1:])
    assert request.start.nproc == int(ranks[9:10] or 0)
    assert [*request.given.values()] == ["a b-2", "memory://c-2", "0.001"]


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


def test_one_rank_speaks_first_and_last_those_that_have_only_lost_another(monkeypatch):
    waits, errors = [], [ConfigError(), PeerError()]
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program.time, "sleep", waits.append)
    monkeypatch.setattr(program, "read_words", Mock(side_effect=errors))
    assert [main([]), main([])] == [2, 1]
    assert waits == pytest.approx([0.2, 1.8])  # torch looks for ended ranks every 0.1 s


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
    monkeypatch.setenv(LAUNCHER, "")
    assert main(["train", "--data", "a", "--nproc", "2"]) == code
