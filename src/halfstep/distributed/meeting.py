"""How ranks that were started one by one find each other, in every attempt anew."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from halfstep.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OVER = "over"
_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h


@dataclass(frozen=True, slots=True)
class Place:
    """What a launcher's environment variables say."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    restarts: int
    run: str
    agent_store: bool
    """The launcher keeps the store; otherwise rank 0 does."""


def find_place(environment: Mapping[str, str]) -> Place | None:
    """This rank's place, or None where the environment describes no ranks.

    Raises:
        ConfigError: If it is incomplete or contradicts itself.
    """
    if not any(name in environment for name in _NEEDED[:3]):
        return None
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"the environment has only some of {', '.join(_NEEDED)}; missing: "
            f"{', '.join(missing)}; start ranks with --nproc or torchrun, which set all of them, "
            "or unset the rest"
        )
    numbers = {}
    for name in (*_NEEDED[:3], "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        text = environment.get(name, "0")
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r} in the environment; allowed: integers")
        numbers[name] = int(text)
    rank, size, local_rank, port, restarts = numbers.values()
    if not (local_rank <= rank < size and 0 < port < 2**16):
        raise ConfigError(
            f"the environment contradicts itself: RANK={rank}, WORLD_SIZE={size}, "
            f"LOCAL_RANK={local_rank}, MASTER_PORT={port}; allowed: LOCAL_RANK <= RANK < "
            "WORLD_SIZE, and a port from 1 to 65535"
        )
    return Place(
        rank,
        size,
        local_rank,
        environment["MASTER_ADDR"],
        port,
        restarts,
        environment.get("TORCHELASTIC_RUN_ID", ""),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def open_store(place: Place, timeout_seconds: float) -> Any:
    """The store that outlives attempts, if the launcher keeps it."""
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without saying so
        place.address,
        place.port,
        is_master=place.rank == 0 and not place.agent_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return prefixed(f"halfstep/{place.run}", store)


def prefixed(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin so."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def meet(store: Any, place: Place, timeout_seconds: float) -> tuple[int, Any]:
    """Agree with the other *living* ranks on the attempt's number and its part of the store.

    Gloo would look for ranks at the addresses of dead ones, if attempts shared their keys.

    Restart counts will not do: on several machines they are counted by one agent each, and agents
    that see another's restart restart without counting. So each rank asks under a name of its own,
    rank 0 answers whoever asks, and an answer to the dead does no harm::

        rank r:   hello/r = own name;  until there is welcome/(own name): wait;  met/n += 1
        rank 0:   n = opened += 1;  until met/n == size - 1: answer every hello/r with n
    """
    end = time.monotonic() + timeout_seconds

    def refuse_over() -> None:
        if store.check([_OVER]):
            raise RuntimeError(f"the run is over, by {store.get(_OVER).decode()}")

    def pause() -> None:
        refuse_over()
        if time.monotonic() > end:
            raise RuntimeError("not all ranks have come")
        time.sleep(0.02)

    refuse_over()
    if place.rank:
        name = uuid.uuid4().hex
        store.set(f"hello/{place.rank}", name)
        while not store.check([f"welcome/{name}"]):
            pause()
        number, _, attempt = store.get(f"welcome/{name}").decode().partition(" ")
        store.add(f"met/{number}", 1)
        return int(attempt), prefixed(f"attempt_{number}", store)
    opened = store.add("opened", 1)
    number, attempt = str(opened), str(max(opened - 1, place.restarts))
    answered: set[str] = set()
    while store.add(f"met/{number}", 0) < place.size - 1:
        for other in range(1, place.size):
            if store.check([f"hello/{other}"]):
                name = store.get(f"hello/{other}").decode()
                if name not in answered:
                    store.set(f"welcome/{name}", f"{number} {attempt}")
                    answered.add(name)
        pause()
    return int(attempt), prefixed(f"attempt_{number}", store)


def declare_over(store: Any, why: str) -> None:
    """Let no other attempt of this run begin, on any machine."""
    store.set(_OVER, why)


def end_with_parent() -> None:
    """Get SIGTERM when the launcher dies, even by SIGKILL: an orphan would write on and on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
