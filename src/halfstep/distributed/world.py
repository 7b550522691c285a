"""The ranks of a run: this process's rank, how ranks meet, and the small messages they exchange.

torchrun, ``halfstep train --nproc`` or any launcher that sets the same environment variables
starts the processes; :func:`open_world` makes a process group of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import ConfigError, HalfstepError, PeerError, StorageError
from halfstep.precision.border import as_device
from halfstep.precision.words import heard, lost, say, tell

T = TypeVar("T")

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OVER = "over"  # the key of a run that no attempt may begin again
_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h

TIMEOUT_SECONDS = 300.0
"""A collective that takes longer is taken to have lost a rank; this allows for slow disks."""

# While ranks work apart, their states go round; where they differ, the highest counts.
_DONE, _WORKS, _FAILED = range(3)
_IDLE = 0.01  # of a processor that a process uses, or a hundredth of it that its work does


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
    _timeout: float = TIMEOUT_SECONDS

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
        tell(error)
        lost(error, range(self.size), "waits for the others")
        if self._store is None or isinstance(error, PeerError | StorageError):
            return
        if isinstance(error, HalfstepError):  # a restart would only fail in the same way
            with suppress(RuntimeError):
                self._store.set(_OVER, str(error.exit_code))

    def require_same(self, what: Mapping[str, str]) -> None:
        """Refuse ranks that were started with different settings.

        Args:
            what: Name to value; the same names on all ranks.

        Raises:
            ConfigError: On every rank, naming the rank that differs from rank 0, and in what.
        """
        everyone = self.gather(lambda: dict(what))
        for rank, theirs in enumerate(everyone):
            for name, first in everyone[0].items():
                if theirs.get(name) != first:
                    raise ConfigError(
                        f"rank {rank} has another {name} than rank 0: {theirs.get(name)!r} and "
                        f"{first!r}; start every rank with the same command line, configuration, "
                        "data and versions"
                    )

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        box = [text]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank, for any time; return all results on every rank.

        Raises:
            PeerError: If it raises on another rank, or one is stopped or hangs meanwhile.
        """
        value = self._work_together(work)
        found: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
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

        The work may take any time.

        Raises:
            PeerError: On the other ranks, at once, if it raises on rank 0, or one is stopped.
        """
        result: T | None = self._work_together(work if self.is_main else _nothing)
        return result

    def first_on_machine(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the first rank of each machine, then on the others, who find its cache.

        The work may take any time.

        Raises:
            PeerError: At once, if it raises on any other rank, or one is stopped.
        """
        first = self.local_rank == 0
        early: T = self._work_together(work if first else _nothing)
        late: T = self._work_together(_nothing if first else work)
        return early if first else late

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group."""
        if self.size > 1 and dist.is_initialized():
            try:
                self.largest(0)
            except RuntimeError as error:
                if "Timed out" in str(error):  # one that died this late reports its own error
                    lost(error, range(self.size), "ends")
            dist.destroy_process_group()

    def _work_together(self, work: Callable[[], T]) -> T:
        """Do this rank's work; return when all ranks have done theirs, raise when any failed.

        Meanwhile a thread of each rank meets those of the others again and again. So work may take
        any time, and yet a rank that is stopped is missed within the timeout of one collective, and
        one that hangs finds out itself.
        """
        if self.size == 1:
            return work()
        clock = time.CLOCK_PROCESS_CPUTIME_ID
        if sys.platform == "linux":
            clock = time.pthread_getcpuclockid(threading.get_ident())
        state: Future[int] = Future()
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(self._meet, state, clock)
            try:
                result = work()
            except BaseException as error:
                tell(error)
                state.set_result(_FAILED + self.size - self.rank)
                with suppress(RuntimeError):  # raise this rank's own error, not a later one
                    met.result()
                raise
            state.set_result(_DONE)
            failed = met.result() - _FAILED
        if failed >= 0:
            raise PeerError(heard([self.size - failed], 1.0))
        return result

    def _meet(self, state: Future[int], clock: int) -> int:
        """Meet the other ranks until all have done their work, or one has failed: the state."""

        def used() -> float:  # seconds; these meetings alone use 0.002 of a processor
            return time.process_time() + 100 * time.clock_gettime(clock)

        before, since, most = used(), time.monotonic(), _WORKS
        try:
            while most == _WORKS:
                wait([state], min(1.0, self._timeout / 4))
                most = self.largest(state.result() if state.done() else _WORKS)
                if state.done() or used() - before > _IDLE * self._timeout:
                    before, since = used(), time.monotonic()
                elif time.monotonic() - since > self._timeout:
                    say(text := f"hangs: its work has used no processor for {self._timeout:g} s")
                    raise PeerError(text)
        except RuntimeError as error:
            if self._store is not None and not state.done():
                # nothing else can end this rank's own work, which may take hours
                print(f"halfstep: error: rank {self.rank}: in its part: {error}", file=sys.stderr)
                os._exit(PeerError.exit_code)
            raise
        return most

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers on every rank, through host memory."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
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
        ConfigError: If the environment is incomplete.
        PeerError: If the ranks do not meet in time.
        PrecisionError: If ``device_kind`` is not a device.
    """
    device_kind = as_device(device_kind).type
    if (place := _place()) is None:
        return World()
    rank, size, local_rank = place
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    device = _own_gpu(local_rank) if device_kind == "cuda" else None
    if run and sys.platform == "linux":  # SIGTERM when the launcher dies: an orphan would write on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        store = _prefixed(f"halfstep/{run}", store)
        if store.check([_OVER]):
            raise SystemExit(int(store.get(_OVER)))  # the attempt before has said why
        if size > 1:
            dist.init_process_group(
                # "cpu:gloo" would leave the group without a default backend, and torch would warn
                "gloo" if device is None else "cpu:gloo,cuda:nccl",
                # its own keys for each attempt: gloo would look for ranks at dead ones' addresses
                store=_prefixed(f"attempt_{attempt}", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device,
            )
    except RuntimeError as error:  # the base class of torch.distributed's own errors
        address = "{MASTER_ADDR}:{MASTER_PORT} (MASTER_ADDR, MASTER_PORT)".format_map(os.environ)
        reason = str(error).partition("\n")[0]
        raise PeerError(
            f"the {size} ranks did not meet at {address} within {timeout_seconds:g} s: {reason}"
        ) from error
    return World(rank, size, local_rank, attempt, store, timeout_seconds)


def _place() -> tuple[int, ...] | None:
    """RANK, WORLD_SIZE and LOCAL_RANK of the environment; ConfigError if it is incomplete."""
    given = {name: os.environ.get(name, "") for name in _NEEDED}
    numbers = [*given.values()][:3]
    if not any(numbers):
        return None
    if not all(given.values()) or not all(map(str.isdecimal, numbers)):
        raise ConfigError(
            f"the environment has {given}; allowed: all of them, the first three as integers, or "
            "none. --nproc and torchrun set them"
        )
    return tuple(map(int, numbers))


def _prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # as rendezvous above


def _own_gpu(local_rank: int) -> torch.device:
    torch.cuda.set_device(local_rank)  # torch says if there is none of that number
    return torch.device("cuda", local_rank)


def _nothing() -> Any:
    """Do nothing: the work of a rank that only waits for others."""


@torch.no_grad()
def broadcast_tensors_(tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of rank 0 to all ranks, bit for bit; collective."""
    waiting = []
    for tensor in {id(t): t for t in tensors}.values():
        values = tensor.contiguous()
        # sent as bytes, because some backends do not support every dtype
        data = values.reshape(-1).view(torch.uint8)
        work = dist.broadcast(data, src=0, async_op=True)
        waiting.append((work, tensor, values))
    for work, tensor, values in waiting:
        work.wait()
        if values is not tensor:
            tensor.copy_(values)
