"""The ranks of a run: who this process is among them, and the few words that ranks exchange.

torchrun, ``halfstep train --nproc`` or any launcher that sets the same environment variables
starts the processes; :func:`open_world` makes a process group of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from halfstep.distributed.meeting import declare_over, end_with_parent, find_place, meet, open_store
from halfstep.errors import ConfigError, HalfstepError, PeerError
from halfstep.precision.border import as_device

T = TypeVar("T")

TIMEOUT_SECONDS = 300.0
"""A collective that takes longer has lost a rank; long enough for a slow disk at a checkpoint."""

# Preparing data, such as making a tokenizer for a large corpus, and writing a large checkpoint may
# take longer than any collective; a rank that dies meanwhile is noticed at once all the same.
_PREPARING = timedelta(days=2)
SAVING_SECONDS = 3600.0
"""The longest that ranks wait for each other's part of a checkpoint."""


@dataclass(frozen=True, slots=True)
class World:
    """One process among ``size``; every method is called by all ranks in the same order.

    Made by :func:`open_world`. Alone, every method does at once what it promises.
    """

    rank: int = 0
    """0 to size - 1."""
    size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """The rank's number on its machine, and its GPU there."""
    attempt: int = 0
    """How often the ranks were started before; the same number on all ranks."""
    _store: Any = None
    """Lives as long as the launcher, through all attempts."""

    @classmethod
    def alone(cls) -> World:
        """One process without any process group."""
        return cls()

    @classmethod
    def around_group(cls) -> World:
        """The ranks of a default process group that somebody else made, all on one machine."""
        rank = dist.get_rank()
        return cls(rank, dist.get_world_size(), rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes what only one may."""
        return self.rank == 0

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:  # after a failure the process ends, and so do the others' calls
            self.close()
            return
        own = isinstance(error, HalfstepError) and not isinstance(error, PeerError)
        if own and self._store is not None:  # another attempt would only be refused once more
            with suppress(RuntimeError):
                declare_over(self._store, f"rank {self.rank}: {error}")

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers, on every rank."""
        return self._maximum(number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._maximum(0)

    def wait_for_save(self) -> None:
        """Wait for ranks that may be waiting for a disk."""
        self._maximum(0, timedelta(seconds=SAVING_SECONDS))

    def require_same(self, what: Mapping[str, str]) -> None:
        """Refuse ranks that were started with different things.

        Args:
            what: Name to value; the same names on all ranks.

        Raises:
            ConfigError: The same on every rank: which rank differs from rank 0, and in what.
        """
        theirs = json.loads(self.share(json.dumps(what)))
        odd = [number for number, name in enumerate(what) if what[name] != theirs.get(name)]
        mark = self._maximum((self.rank * len(what) + odd[0] + 1) if odd else 0)
        if mark:
            rank, number = divmod(mark - 1, len(what))
            name = [*what][number]
            own = f": {what[name]!r} and {theirs[name]!r}" if rank == self.rank else ""
            raise ConfigError(
                f"rank {rank} has another {name} than rank 0{own}; start every rank with the same "
                "command line, configuration, data and versions"
            )

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.size == 1:
            return text
        data = text.encode("utf-8", "surrogateescape")  # of a path that is no UTF-8
        length = self._maximum(len(data) if self.is_main else 0)
        if not self.is_main or not length:
            data = bytes(max(length, 1))
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return bytes(tensor[:length].tolist()).decode("utf-8", "surrogateescape")

    def remember(self, key: str, text: str) -> str:
        """The text that rank 0 gave for ``key`` in the first attempt, on all ranks and attempts.

        The memory is the launcher's: it ends with the run.
        """
        if self._store is not None and self.is_main:
            # "=": to a store, an empty value and none are the same
            text = self._store.compare_set(f"remember/{key}", "", f"={text}").decode()[1:]
        return self.share(text)

    def main_only(self, work: Callable[[], T]) -> T | None:
        """Do ``work`` on rank 0 while the others wait; its result there, None elsewhere.

        It may take as long as writing a checkpoint may.

        Raises:
            PeerError: On the other ranks, at once, if it raises on rank 0.
        """
        patience = timedelta(seconds=SAVING_SECONDS)
        result: T | None = self._work_together(work if self.is_main else _nothing, patience)
        return result

    def first_on_machine(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the first rank of each machine, then on the others, as a cache wants it.

        It may take longer than a collective may.

        Raises:
            PeerError: At once, if it raises on any other rank.
        """
        first = self.local_rank == 0
        early: T = self._work_together(work if first else _nothing, _PREPARING)
        late: T = self._work_together(_nothing if first else work, _PREPARING)
        return early if first else late

    def close(self) -> None:
        """End the process group, after all ranks have come here."""
        if self.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):  # a rank that died when all was done tells so itself
                self.barrier()
            dist.destroy_process_group()

    def _work_together(self, work: Callable[[], T], patience: timedelta | None) -> T:
        """Do each rank's work; return when all have done theirs, raise when any has failed."""
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # the first failure is the one to tell
                self._maximum(self.size - self.rank, patience)
            raise
        failed = self._maximum(0, patience)
        if failed:
            raise PeerError(f"rank {self.size - failed} failed; its own message tells why")
        return result

    def _maximum(self, number: int, timeout: timedelta | None = None) -> int:
        """The largest of all ranks' numbers, through the host."""
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
    """Join the ranks that the environment describes; alone where it describes none.

    Host tensors go through gloo, and those of CUDA through NCCL, in one default group.

    Args:
        device_kind: A device, or its name: ``"cpu"``, or ``"cuda"`` for the GPU of this rank's
            ``local_rank``.
        timeout_seconds: Bound of every collective and of the meeting itself.

    Raises:
        ConfigError: If the environment is incomplete or contradicts itself, or a rank has no GPU.
        PeerError: If the ranks do not meet in time.
        PrecisionError: For what is no device.
    """
    device_kind = as_device(device_kind).type
    place = find_place(os.environ)
    if place is None:
        return World.alone()
    device = None
    if device_kind == "cuda":
        device = torch.device("cuda", place.local_rank)
        count = torch.cuda.device_count()
        if place.local_rank >= count:
            raise ConfigError(
                f"LOCAL_RANK={place.local_rank}, but this machine has {count} GPUs; start one "
                "rank per GPU, or choose --device cpu"
            )
        torch.cuda.set_device(device)
    if place.run:
        end_with_parent()
    try:
        store = open_store(place, timeout_seconds)
        attempt, own = meet(store, place, timeout_seconds)
        if place.size > 1:
            dist.init_process_group(
                # "cpu:gloo" alone would leave the group without a default, of which torch warns
                "gloo" if device is None else "cpu:gloo,cuda:nccl",
                store=own,
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=timeout_seconds),
                device_id=device,
            )
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors all
        reason = str(error).partition("\n")[0]
        raise PeerError(
            f"the {place.size} ranks did not meet at {place.address}:{place.port} (MASTER_ADDR, "
            f"MASTER_PORT) within {timeout_seconds:g} s: {reason}"
        ) from error
    return World(place.rank, place.size, place.local_rank, attempt, store)


def _nothing() -> Any:
    """The work of a rank that has none."""
