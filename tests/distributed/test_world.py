"""Ranks meet, agree and fail together; what one rank's failure means to the others."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from every import every
from halfstep.distributed.world import Place, World, find_place, meet, open_world
from halfstep.errors import ConfigError, PeerError

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
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


IMPOSSIBLE = [
    ({"MASTER_PORT": None}, "missing: MASTER_PORT"),
    ({"LOCAL_RANK": None, "MASTER_ADDR": ""}, "missing: LOCAL_RANK, MASTER_ADDR"),
    ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
    ({"RANK": "0"}, "LOCAL_RANK <= RANK"),
    ({"RANK": "-1"}, "RANK='-1'"),
    ({"MASTER_PORT": "70000"}, "65535"),
    ({"TORCHELASTIC_RESTART_COUNT": "two"}, "TORCHELASTIC_RESTART_COUNT='two'"),
]


def test_an_environment_that_cannot_be_is_refused():
    def check(change, words):
        environment = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
        with pytest.raises(ConfigError, match=words):
            find_place(environment)

    every(IMPOSSIBLE, check)


def place(rank, size=2, restarts=0):
    return Place(rank, size, rank, "127.0.0.1", 1, restarts, "x", True)


@pytest.fixture
def store():
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def meet_all(store, places, seconds=10):
    """What ``meet`` gives each place, by threads; an exception stands for itself."""
    results = [None] * len(places)
    client = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in places]

    def one(index):
        try:
            results[index] = meet(client[index], places[index], seconds)
        except RuntimeError as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_attempt_meets_under_its_own_prefix(store):
    (first, one), (again, two) = meet_all(store, [place(0), place(1)])
    assert first == again == 0
    one.set("key", "of attempt 0")
    assert two.get("key") == b"of attempt 0"
    # agents of two machines have counted restarts differently
    (first, one), (again, two) = meet_all(store, [place(0, restarts=3), place(1, restarts=1)])
    assert first == again == 3
    assert not two.check(["key"])


def test_the_dead_do_not_disturb_a_meeting(store):
    store.set("hello/1", "a rank 1 that died while it waited")
    (failed,) = meet_all(store, [place(0)], seconds=0.5)
    assert "not all ranks have come" in str(failed)
    (first, _), (again, _) = meet_all(store, [place(0), place(1)])
    assert first == again == 1


def test_a_run_that_is_over_does_not_begin_again(store):
    store.set("over", "rank 1: no such policy")
    for result in meet_all(store, [place(0), place(1)]):
        assert "the run is over, by rank 1: no such policy" in str(result)


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
    expected = [(f"PeerError: rank {failing} failed; its own message tells why", True)] * 2
    expected[failing] = ("ValueError: disk", True)
    assert results == expected
