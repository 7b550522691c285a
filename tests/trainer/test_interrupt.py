"""A signal that comes twice is one request; a second request acts at once."""

from __future__ import annotations

import signal

import pytest
from tests.trainer.runs import metrics, small_config

from halfstep.cli import train
from halfstep.cli.main import main
from halfstep.trainer import loop as interrupt, run as runs
from halfstep.trainer.config.config import config_to_toml
from halfstep.trainer.loop import Interrupt

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


class Second(Exception):
    """What the handlers of the test raise."""


@pytest.fixture(autouse=True)
def handlers():
    """Handlers that raise, and the real ones back at the end."""

    def act(number, frame):
        raise Second(number)

    old = {n: signal.signal(n, act) for n in (signal.SIGTERM, signal.SIGINT)}
    yield act
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test lets pass."""
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    return now


@BOTH
def test_a_repeated_signal_is_one_request_and_a_later_one_acts(number, clock, handlers):
    with Interrupt() as asked:
        assert asked.requested == ""
        signal.raise_signal(number)
        assert asked.requested == number.name
        clock[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(number)
        assert asked.requested == number.name
        clock[0] += 0.2
        with pytest.raises(Second):
            signal.raise_signal(number)
    assert signal.getsignal(number) is handlers


@BOTH
def test_the_block_may_end_between_a_signal_and_its_repetition(number, clock, handlers):
    with Interrupt():
        signal.raise_signal(number)
    clock[0] += 0.5
    signal.raise_signal(number)  # does not act
    clock[0] += 0.6
    with pytest.raises(Second):
        signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is handlers
    assert signal.getsignal(signal.SIGINT) is handlers


@pytest.mark.parametrize("where", ["train", "_take_step", "save_checkpoint", "finish_run"])
def test_a_run_cut_anywhere_says_how_to_go_on(corpus, tmp_path, monkeypatch, capsys, where):
    """Before the first step, within the sixth, before its checkpoint, and after the last step."""
    monkeypatch.setattr(train, "keep_freed_memory", lambda **_: None)
    file, path, calls = tmp_path / "x.toml", tmp_path / "cut", []
    file.write_text(config_to_toml(small_config(corpus, run__save_every=2)))
    words = ["train", "--config", str(file), "--quiet", "--output-dir"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    owner = runs if where in ("train", "finish_run") else interrupt
    real, at = getattr(owner, where), {"_take_step": 6, "save_checkpoint": 3}.get(where, 1)

    def cut(*args, **options):
        calls.append(0)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, cut)
        capsys.readouterr()
        assert main([*words, str(path)]) == 130
    said = capsys.readouterr().err
    said, _, command = said.partition("halfstep train ")
    assert said == "halfstep: error: interrupted; go on: "
    assert main(["train", *command.split(), "--quiet"]) == 0
    assert metrics(path) == metrics(tmp_path / "whole")
