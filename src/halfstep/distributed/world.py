"""The ranks of a run: this process's rank, how ranks meet, and the small messages they exchange.

torchrun, ``halfstep train --nproc`` or any launcher that sets the same environment variables
starts the processes; :func:`open_world` makes a process group of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from halfstep.errors import ConfigError, HalfstepError, PeerError
from halfstep.precision.border import as_device

T = TypeVar("T")

TIMEOUT_SECONDS = 300.0
"""A collective that takes longer is taken to have lost a rank; this allows for slow disks."""

# Preparing data, such as training a tokenizer on a large corpus, and writing a large checkpoint may
# take longer than any collective. A rank that dies meanwhile is still noticed at once.
_PREPARING = timedelta(days=2)
SAVING_SECONDS = 3600.0
"""The longest that ranks wait for each other's part of a checkpoint."""


@dataclass(frozen=True, slots=True)
class World:
    """One process among ``size``; all ranks must call every method in the same order.

    :func:`open_world` makes it. In a world of one rank, methods return without communicating.
    """

    rank: int = 0
    """This process's number, 0 to size - 1."""
    size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """The rank's number on its machine, and its GPU there."""
    attempt: int = 0
    """Number of earlier starts of this run's ranks; the same on all ranks."""
    _store: Any = None
    """Key-value store that lives as long as the launcher, through all attempts."""

    @classmethod
    def around_group(cls) -> World:
        """Wrap a default process group that the caller has made, all ranks on one machine."""
        rank = dist.get_rank()
        return cls(rank, dist.get_world_size(), rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes what only one may."""
        return self.rank == 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:  # after a failure, this process's exit makes the others' calls fail
            self.close()
            return
        own = isinstance(error, HalfstepError) and not isinstance(error, PeerError)
        if own and self._store is not None:  # a restart would only fail in the same way
            with suppress(RuntimeError):
                self._store.set(_OVER, f"rank {self.rank}: {error}")

    def require_same(self, what: Mapping[str, str]) -> None:
        """Refuse ranks that were started with different settings.

        Args:
            what: Name to value; the same names on all ranks.

        Raises:
            ConfigError: On every rank, naming the rank that differs from rank 0, and in what.
        """
        theirs = json.loads(self.share(json.dumps(what)))
        odd = [number for number, name in enumerate(what) if what[name] != theirs.get(name)]
        mark = self.largest((self.rank * len(what) + odd[0] + 1) if odd else 0)
        if mark:
            rank, number = divmod(mark - 1, len(what))
            name = [*what][number]
            own = f": {what[name]!r} and {theirs[name]!r}" if rank == self.rank else ""
            raise ConfigError(
                f"rank {rank} has another {name} than rank 0{own}; start every rank with the same "
                "command line, configuration, data and versions"
            )

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        box = [text]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank; they may wait as long as for a checkpoint."""
        self.largest(0, timedelta(seconds=SAVING_SECONDS))
        found = []
        for rank in range(self.size):
            box = [value]
            if self.size > 1:
                dist.broadcast_object_list(box, src=rank, device=torch.device("cpu"))
            found += box
        return found

    def remember(self, key: str, text: str) -> str:
        """Return what rank 0 passed for ``key`` in the first attempt, on all ranks and attempts.

        The launcher's store keeps it, and so it ends with the run.
        """
        if self._store is not None and self.is_main:
            # the "=" is there because a store does not distinguish an empty value from none
            text = self._store.compare_set(f"remember/{key}", "", f"={text}").decode()[1:]
        return self.share(text)

    def main_only(self, work: Callable[[], T]) -> T | None:
        """Do ``work`` on rank 0 while the others wait; return its result there, None elsewhere.

        The work may take as long as writing a checkpoint may.

        Raises:
            PeerError: On the other ranks, at once, if it raises on rank 0.
        """
        patience = timedelta(seconds=SAVING_SECONDS)
        result: T | None = self._work_together(work if self.is_main else _nothing, patience)
        return result

    def first_on_machine(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the first rank of each machine, then on the others, who find its cache.

        The work may take longer than a collective may.

        Raises:
            PeerError: At once, if it raises on any other rank.
        """
        first = self.local_rank == 0
        early: T = self._work_together(work if first else _nothing, _PREPARING)
        late: T = self._work_together(_nothing if first else work, _PREPARING)
        return early if first else late

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group."""
        if self.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):  # a rank that died this late reports its own error
                self.largest(0)
            dist.destroy_process_group()

    def _work_together(self, work: Callable[[], T], patience: timedelta | None) -> T:
        """Do this rank's work; return when all ranks have done theirs, raise when any failed."""
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # raise this rank's own error, not a later one
                self.largest(self.size - self.rank, patience)
            raise
        failed = self.largest(0, patience)
        if failed:
            raise PeerError(f"rank {self.size - failed} failed; its own message tells why")
        return result

    def largest(self, number: int, timeout: timedelta | None = None) -> int:
        """Return the largest of all ranks' numbers on every rank, through host memory."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        if timeout is not None:
            options.timeout = timeout
        group: Any = dist.group.WORLD
        group.allreduce([tensor], options).wait()
        return int(tensor)


def open_world(
    device_kind: str | torch.device, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> World:
    """Join the ranks that the environment describes; without any, return a world of one rank.

    Host tensors go through gloo and CUDA tensors through NCCL, in one default group.

    Args:
        device_kind: A device, or its name: ``"cpu"``, or ``"cuda"`` for the GPU of this rank's
            ``local_rank``.
        timeout_seconds: Time limit of every collective and of the meeting of the ranks.

    Raises:
        ConfigError: If the environment is incomplete or contradicts itself, or a rank has no GPU.
        PeerError: If the ranks do not meet in time.
        PrecisionError: If ``device_kind`` is not a device.
    """
    device_kind = as_device(device_kind).type
    place = find_place(os.environ)
    if place is None:
        return World()
    device = _own_gpu(place) if device_kind == "cuda" else None
    if place.run:
        end_with_parent()
    try:
        store = open_store(place, timeout_seconds)
        attempt, own = meet(store, place, timeout_seconds)
        if place.size > 1:
            dist.init_process_group(
                # "cpu:gloo" would leave the group without a default backend, and torch would warn
                "gloo" if device is None else "cpu:gloo,cuda:nccl",
                store=own,
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=timeout_seconds),
                device_id=device,
            )
    except RuntimeError as error:  # the base class of torch.distributed's own errors
        reason = str(error).partition("\n")[0]
        raise PeerError(
            f"the {place.size} ranks did not meet at {place.address}:{place.port} (MASTER_ADDR, "
            f"MASTER_PORT) within {timeout_seconds:g} s: {reason}"
        ) from error
    return World(place.rank, place.size, place.local_rank, attempt, store)


def _own_gpu(place: Place) -> torch.device:
    """Choose this rank's GPU of its machine."""
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={place.local_rank}, but this machine has {count} GPUs; start one "
            "rank per GPU, or choose --device cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _nothing() -> Any:
    """Do nothing: the work of a rank that only waits for others."""


# How ranks that were started one by one find each other, again in every attempt.


_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OVER = "over"  # the key of a run that no attempt may begin again, on any machine
_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's description of itself, from the launcher's environment variables."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    restarts: int
    run: str
    agent_store: bool
    """Whether the launcher hosts the store; otherwise rank 0 does."""


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Read this rank's place; None where the environment describes no ranks.

    Raises:
        ConfigError: If the environment is incomplete or contradicts itself.
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
    """Open the store, which outlives attempts if the launcher hosts it."""
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without saying so
        place.address,
        place.port,
        is_master=place.rank == 0 and not place.agent_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return prefixed(f"halfstep/{place.run}", store)


def prefixed(prefix: str, store: Any) -> Any:
    """Return a view of the store in which every key has this prefix."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def meet(store: Any, place: Place, timeout_seconds: float) -> tuple[int, Any]:
    """Agree with the other *living* ranks on the attempt's number and its part of the store.

    If attempts shared their keys, gloo would look for ranks at the addresses of dead ones.

    The launcher's restart count does not identify an attempt: each machine's agent counts its own,
    and one that restarts because of another's restart does not count it. So each rank asks under a
    random name, and rank 0 answers everyone who asks; an answer to a dead rank does no harm::

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


def end_with_parent() -> None:
    """Ask for SIGTERM when the launcher dies, even by SIGKILL; an orphan would go on writing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
