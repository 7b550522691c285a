"""Ranks meet, agree and fail together; what one rank's failure means to the others."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from halfstep.distributed.world import World, open_world
from halfstep.errors import CheckpointError, ConfigError, PartedError, PeerError, StorageError

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


def test_one_process_needs_no_group(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.local_rank, world.attempt) == (0, 1, 0, 0)
        assert world.is_main
        assert bool(world.largest(int(True)))
        assert not world.largest(int(False))
        assert world.share("text") == "text"
        assert world.remember("key", "text") == "text"
        assert world.main_only(lambda: 5) == 5
        assert world.first_on_machine(lambda: 6) == 6
        with pytest.raises(ZeroDivisionError):
            world.main_only(lambda: 1 / 0)
    assert not dist.is_initialized()
    assert World() == World()


def test_half_an_environment_is_refused_and_ranks_that_do_not_come_are_told(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerError, match=r"the 4 ranks did not meet at 127.0.0.1:29500 .* 0.5 s"):
        open_world("cpu", timeout_seconds=0.5)
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ConfigError, match=r"'MASTER_ADDR': '', 'MASTER_PORT': ''.*; allowed"):
        open_world("cpu")


def words(rank):
    world = World.around_group()
    value = world.main_only(lambda: rank + 5)
    assert value == (5 if rank == 0 else None)
    assert world.first_on_machine(lambda: rank * 2) == rank * 2
    assert bool(world.largest(int(rank == 1)))
    assert not world.largest(int(False))
    texts = [f"from {rank}", "" if rank == 0 else "x", "größe \udcff" * 1000 if rank == 0 else ""]
    return [world.share(text) for text in texts], world.remember("key", f"of {rank}")


@pytest.mark.distributed
def test_what_rank_0_says_all_hear(pool2):
    expected = (["from 0", "", "größe \udcff" * 1000], "of 0")
    assert pool2.run(words) == [expected, expected]


def told(rank, method, failing):
    """What this rank gets to know, and after how many seconds."""
    world = World.around_group()

    def work():
        if rank == failing:
            raise ValueError("disk")
        return rank

    start = time.monotonic()
    try:
        result = getattr(world, method)(work)
    except (ValueError, PeerError) as error:
        result = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    assert bool(world.largest(int(rank == 0)))  # the group is as good as before
    return result, seconds < 5


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "failing"), [("main_only", 0), ("first_on_machine", 0), ("first_on_machine", 1)]
)
def test_a_failure_on_one_rank_is_told_to_the_other_at_once(pool2, method, failing):
    results = pool2.run(told, method=method, failing=failing)
    expected = [(f"PeerError: rank {failing}: ValueError: disk", True)] * 2
    expected[failing] = ("ValueError: disk", True)
    assert results == expected


def compare(rank, values):
    world = World.around_group()
    try:
        world.require_same(dict(values[rank]))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_the_first_difference_is_named_on_every_rank(pool4):
    same = {"version": "1", "data": "abc", "seed": "7"}
    assert pool4.run(compare, values=[same] * 4) == [""] * 4
    values = [same, same, {**same, "data": "abd", "seed": "8"}, same]
    found = pool4.run(compare, values=values)
    assert all("rank 2 has another data than rank 0" in text for text in found)
    assert all("'abd' and 'abc'" in text for text in found)


@pytest.mark.parametrize(("error", "over"), [(CheckpointError, True), (StorageError, False),
                                             (PartedError, False)])  # fmt: skip
def test_a_run_that_would_fail_again_is_over_and_one_that_may_pass_is_not(error, over):
    store = dist.HashStore()
    with pytest.raises(error), World(1, 2, _store=store):
        raise error("text")
    assert store.check(["over"]) is over
