"""Finite spikes in whole runs: the answer, and the resume."""

from pathlib import Path

import pytest
from tests.trainer.runs import assert_same_tensors, metrics, run, small_config, start

from halfstep.trainer.loop import train
from halfstep.trainer.session import open_session

pytestmark = pytest.mark.filterwarnings("ignore:the step is left out")


def config(corpus, answer, **overrides):
    values = {"run__max_steps": 30, "run__eval_every": 0, "run__save_every": 0} | overrides
    return small_config(corpus, run__on_spike=answer, **values)


def spoil(session, steps):
    """Multiply the loss of these steps by 300: finite, and far above any other."""
    loss_sum = session.loss_sum

    def wrapped(batch):
        total, count = loss_sum(batch)
        return (total * 300 if session.step + 1 in steps else total), count

    session.loss_sum = wrapped


def follow(config, path, steps, until=None):
    session, folder = start(config, path)
    spoil(session, steps)
    try:
        for tick in train(session, Path(folder.name).parent):
            if tick.record.step == until:
                break
    finally:
        folder.close()
    return session


def test_a_spiking_step_is_not_applied(corpus, tmp_path):
    follow(config(corpus, "skip:2"), tmp_path / "r", {26})
    lines = metrics(tmp_path / "r")
    assert [line["step"] for line in lines if not line["applied"]] == [26]
    assert lines[25]["skip_reason"] in ("loss_spike", "gradient_spike")


def test_a_resumed_run_decides_the_same(corpus, tmp_path, monkeypatch):
    steps = {24, 25, 28}
    wanted = config(corpus, "skip:2", run__save_every=13)
    whole = follow(wanted, tmp_path / "whole", steps)
    follow(wanted, tmp_path / "r", steps, until=27)  # past the checkpoint of step 26

    def opened(*args, **kwargs):
        session = open_session(*args, **kwargs)
        spoil(session, steps)
        return session

    monkeypatch.setattr("tests.trainer.runs.open_session", opened)
    session, _ = run(wanted, tmp_path / "r")
    assert metrics(tmp_path / "r") == metrics(tmp_path / "whole")
    one, two = (dict(s.precision.masters.items()) for s in (session, whole))
    assert_same_tensors(one, two)
    assert session.precision.state_dict()["spikes"] == whole.precision.state_dict()["spikes"]
