"""Saving beside training: what is written is the state at save(); no error is ever lost."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch

from halfstep.errors import CheckpointError, NonFiniteError
from halfstep.trainer.checkpoint import Checkpoint, Saver, Team, list_checkpoints, load_checkpoint
from trainer.checkpoint.sharded import (
    LAYOUTS,
    assert_same,
    cut_state,
    side_by_side,
    whole_state,
)


@pytest.fixture
def gate(monkeypatch):
    """Holds every write of a file until it is opened."""
    event = threading.Event()
    real = safetensors.torch.save_file

    def save_file(*args):
        assert event.wait(20)
        real(*args)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    yield event
    event.set()


def state(value=1.0) -> Checkpoint:
    return Checkpoint(
        {"a": torch.full((50, 4), value)}, {"a/exp_avg": torch.full((50, 4), value)}, {"v": value}
    )


def test_the_caller_may_change_everything_as_soon_as_save_returns(tmp_path, gate):
    whole = whole_state()
    mine = cut_state(whole_state(), LAYOUTS["rows"], 0, 1, ("e", "t"))
    wanted = cut_state(whole_state(), LAYOUTS["rows"], 0, 1, ("e", "t"))
    saver = Saver(tmp_path, keep=1)
    saver.save(1, mine)
    assert saver.finished() is None
    for tensor in [*mine.weights.values(), *mine.optimizer.values()]:
        tensor.fill_(77)
    mine.state["note"] = "changed"
    gate.set()
    got = load_checkpoint(saver.wait())
    assert_same(got.weights, wanted.weights)
    assert_same(got.optimizer, wanted.optimizer)
    assert got.state == {"step": 1, **whole.state}
    found = got.optimizer["t/exp_avg"]  # codes, in the order that they had in memory
    assert found.stride() == wanted.optimizer["t/exp_avg"].stride() != (9, 1)


def test_a_second_save_waits_for_the_first_and_both_are_there(tmp_path, gate):
    saver = Saver(tmp_path, keep=2)
    saver.save(1, state(1.0))  # returns at once: the gate is closed
    begin = time.perf_counter()
    threading.Timer(0.5, gate.set).start()
    saver.save(2, state(2.0))
    assert 0.3 < time.perf_counter() - begin < 10
    assert saver.wait() == tmp_path / "step-00000002"
    values = [load_checkpoint(path).state["v"] for path in list_checkpoints(tmp_path)]
    assert values == [1.0, 2.0]


@pytest.mark.parametrize("ask", ["save", "finished", "wait", "close"])
def test_an_error_in_the_thread_is_raised_by_the_next_call_whatever_it_is(tmp_path, ask):
    saver = Saver(tmp_path, keep=1)
    saver.save(1, state())
    saver.wait()
    saver.save(2, state(float("nan")))
    while saver._thread.is_alive():
        time.sleep(0.01)
    with pytest.raises(NonFiniteError, match="a is not finite"):
        saver.save(3, state()) if ask == "save" else getattr(saver, ask)()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    saver.save(4, state())  # told once; it goes on
    assert saver.wait() == tmp_path / "step-00000004"
    saver.close()


def test_ranks_save_many_steps_together(tmp_path):
    savers = [Saver(tmp_path, 2, Team(rank, 3, "run", 30)) for rank in range(3)]

    def steps(rank):
        for step in range(1, 8):
            whole = whole_state(step)
            savers[rank].save(step, cut_state(whole, LAYOUTS["mixed"], rank, 3, ("e",)))
        return savers[rank].wait()

    results = side_by_side([lambda rank=rank: steps(rank) for rank in range(3)])
    assert results == [tmp_path / "step-00000007"] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]
    for step in (6, 7):
        assert_same(load_checkpoint(tmp_path / f"step-{step:08d}").weights,
                    whole_state(step).weights)  # fmt: skip


class Gone(RuntimeError):
    """What a collective raises when a rank has died."""


@pytest.mark.parametrize("ask", ["save", "wait"])
def test_rank_0_does_not_wait_for_the_receipt_of_a_dead_rank(tmp_path, ask):
    met = iter([True])  # with a living rank 1

    def meet():
        if not next(met, False):
            raise Gone

    saver = Saver(tmp_path, 1, Team(0, 2, "run", 0.5), meet)
    states = [cut_state(whole_state(), LAYOUTS["rows"], 0, 2) for _ in range(2)]
    saver.save(1, states[0])  # rank 1 comes to it, and dies before it leaves a receipt
    with pytest.raises(Gone):  # waiting would raise CheckpointError
        saver.wait() if ask == "wait" else saver.save(2, states[1])
    with pytest.raises(CheckpointError, match="no receipt of ranks 1"):
        saver.close()
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_ranks_meet_when_their_parts_are_written_and_before_errors(tmp_path, gate, value):
    """As rank 1: what was being saved, or why it cannot be, is told to rank 0 when they meet."""
    met = []

    def meet():
        met.append(sorted(p.name for p in tmp_path.glob("*/receipt-*.json")))

    saver = Saver(tmp_path, 1, Team(1, 2, "run"), meet)
    mine = cut_state(Checkpoint({"a": torch.full((4,), value)}, {}, {}), {"a": 0}, 1, 2)
    threading.Timer(0.3, gate.set).start()
    with pytest.raises(NonFiniteError) if value != value else nullcontext():
        saver.save(1, mine)
        saver.wait()
    assert met == [[], ["receipt-00002.json"]]


def test_a_step_that_failed_is_saved_again_though_old_receipts_may_lie_there(tmp_path):
    """Rank 1's receipt of the first attempt must not stand for its second."""
    first, second = (Saver(tmp_path, 2, Team(rank, 2, "run", 0.2)) for rank in range(2))
    states = [cut_state(whole_state(), LAYOUTS["rows"], rank, 2) for rank in range(2)]
    first.save(1, states[0])
    with pytest.raises(CheckpointError, match="no receipt of ranks 1"):
        first.wait()
    second.save(1, states[1])  # too late: leaves its files and a receipt
    second.wait()
    first.save(1, states[0])
    with pytest.raises(CheckpointError, match="no receipt of ranks 1"):
        first.wait()
    assert list_checkpoints(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_device_tensors_are_copied_before_save_returns(tmp_path):
    mine = cut_state(whole_state(), LAYOUTS["rows"], 0, 1, ("e", "t"))
    device = Checkpoint(
        {name: tensor.cuda() for name, tensor in mine.weights.items()},
        {name: tensor.cuda() for name, tensor in mine.optimizer.items()},
        mine.state,
    )
    saver = Saver(tmp_path, keep=1)
    saver.save(1, device)
    for tensor in [*device.weights.values(), *device.optimizer.values()]:
        tensor.fill_(77)
    got = load_checkpoint(saver.wait())
    assert_same(got.weights, mine.weights)
    assert_same(got.optimizer, mine.optimizer)
