"""torchrun's agent with a voice: each attempt's failures are told in lines, once, with the cause.

It also knows when to stop: a run that was refused, stopped by a numerics guard or saved upon a
signal is not started again.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from halfstep.cli.outcome import INTERRUPTED, Outcome, forget_outcomes, read_outcomes

# 2 refused, 3 numerics guard, 4 saved upon a signal, 130 Ctrl-C: starting again helps nobody
_FINAL = {2, 3, INTERRUPTED, 130}
# The agent gives ranks 30 s to end after SIGTERM; one that it kills later than this was hung.
_HUNG_SECONDS = 20
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What the agent forwards to the ranks."""
_SECONDS_TO_DIE = 5.0


class Ended(Exception):
    """The run is over, with an exit code that is not 0; all was told."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a rank ended."""

    rank: int
    code: int
    message: str
    follows: bool
    time: float


class Loopback(RendezvousHandler):
    """Where the ranks of one machine meet: a store that only this machine reaches.

    torchrun's own for one machine listens on every network interface, without any password.
    """

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        self._rounds = 0
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._store = None

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store, in every attempt."""
        return True

    def get_backend(self) -> str:
        """The word by which torch's agent tells rendezvous apart."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Another attempt, with keys of its own."""
        self._rounds += 1
        store = dist.PrefixStore(f"agent/{self._rounds}", self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", self._port))

    def is_closed(self) -> bool:
        """Whether new ranks are turned away: never, there are none but the launcher's."""
        return False

    def set_closed(self) -> None:
        """Ignored: no other agent would notice."""

    def num_nodes_waiting(self) -> int:
        """No other machine can come."""
        return 0

    def get_run_id(self) -> str:
        """A fixed name: each store serves a single run."""
        return "halfstep"

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


def worker_spec(
    config: LaunchConfig, handler: RendezvousHandler, program: str, arguments: list[str]
) -> WorkerSpec:
    """What the agent starts; fields that both of torch's classes have are handed on."""
    shared = {field.name for field in fields(WorkerSpec)} & {f.name for f in fields(config)}
    return WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=handler,
        **{name: getattr(config, name) for name in sorted(shared)},
    )


class Agent(LocalElasticAgent):
    """torchrun's agent for one machine's ranks."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, folder: Path) -> None:
        shared = set(inspect.signature(LocalElasticAgent.__init__).parameters)
        names = shared & {"start_method", "log_line_prefix_template", "shutdown_timeout"}
        super().__init__(
            spec=spec,
            logs_specs=config.logs_specs or DefaultLogsSpecs(),
            **{name: getattr(config, name) for name in sorted(names)},
        )
        self._folder = folder
        self._attempts = spec.max_restarts + 1
        self._attempt = 1
        self._size = 0
        self._out_of_memory = _kernel_out_of_memory()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        forget_outcomes(self._folder)
        self._size = worker_group.workers[0].world_size
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        said = read_outcomes(self._folder)
        causes = [
            self._cause(rank, failure, said.get(rank)) for rank, failure in result.failures.items()
        ]
        first = min((cause.time for cause in causes), default=0.0)
        code = self._report([_hung(cause, first) for cause in causes], restarts=True)
        if code in _FINAL or self._attempt == self._attempts:
            raise Ended(code)
        self._attempt += 1
        return result

    def _shutdown(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._shutdown(*arguments, **options)
        except SignalException as second:  # while the ranks were given time to save
            _end_now([worker.id for worker in self.get_worker_group().workers], second.sigval)
            raise

    def report_outcomes(self) -> int | None:
        """Tell what ranks that failed have said; the exit code, or None if none did."""
        said = [each for each in read_outcomes(self._folder).values() if each.message]
        if not said:
            return None
        causes = [_Cause(o.rank, o.code, o.message, o.follows, o.time) for o in said]
        return self._report(causes, restarts=False)

    def _cause(self, rank: int, failure: Any, said: Outcome | None) -> _Cause:
        """What is known about one rank's end."""
        if said is not None and said.code:
            return _Cause(rank, said.code, said.message, said.follows, said.time)
        if failure.exitcode >= 0:
            message = f"ended with exit code {failure.exitcode} and said nothing"
            return _Cause(rank, 1, message, False, failure.timestamp)
        name = f"signal {-failure.exitcode}"
        with suppress(ValueError):
            name = signal.Signals(-failure.exitcode).name
        message = f"was killed by {name}"
        if name == "SIGKILL" and _kernel_out_of_memory() > self._out_of_memory:
            message += "; the kernel says that memory ran out"
        follows = name == "SIGTERM"  # from the agent, when another rank had failed
        return _Cause(rank, 1, message, follows, failure.timestamp)

    def _report(self, causes: list[_Cause], *, restarts: bool) -> int:
        """Print each message once, root causes only; the exit code of the first of them."""
        roots = [cause for cause in causes if not cause.follows] or causes
        if any(cause.code != INTERRUPTED for cause in roots):
            roots = [cause for cause in roots if cause.code != INTERRUPTED]
        roots.sort(key=lambda cause: (cause.time, cause.rank))
        code = roots[0].code if roots else 1
        suffix = ""
        if restarts and self._attempts == 1 and code not in _FINAL:
            suffix = "; go on from the last checkpoint with --resume, or let -- --max-restarts N do"
        elif restarts and code not in _FINAL:
            suffix = f" (attempt {self._attempt} of {self._attempts})"
            if self._attempt < self._attempts:
                suffix += "; starting again"
        ranks: dict[str, list[int]] = defaultdict(list)
        for cause in roots:
            ranks[cause.message].append(cause.rank)
        for message, who in ranks.items():
            if message:
                print(f"halfstep: error: {self._name(who, message)}{suffix}", file=sys.stderr)
        return code

    def _name(self, ranks: list[int], message: str) -> str:
        """A message with its ranks, unless every rank says it."""
        if message.startswith(("was killed", "ended with", "did not")):
            return f"rank {', '.join(map(str, sorted(ranks)))} {message}"
        if len(ranks) == self._size:
            return message
        return f"rank {', '.join(map(str, sorted(ranks)))}: {message}"


def _hung(cause: _Cause, first: float) -> _Cause:
    """A rank that the agent had to kill long after another's failure: it was hung."""
    if cause.message.startswith("was killed by SIGKILL") and cause.time > first + _HUNG_SECONDS:
        return _Cause(cause.rank, 1, "did not answer, and was killed", False, cause.time)
    return cause


def _end_now(pids: list[int], number: int) -> None:
    """End what a second signal left running: the same signal again, then SIGKILL."""
    for handled in SIGNALS:
        signal.signal(handled, signal.SIG_IGN)
    left = {pid for pid in pids if not _ended(pid)}
    for each in (number, signal.SIGKILL):
        for pid in left:
            with suppress(ProcessLookupError):
                os.killpg(pid, each)  # each rank leads a group of its own
        end = time.monotonic() + _SECONDS_TO_DIE
        while left and time.monotonic() < end:
            left = {pid for pid in left if not _ended(pid)}
            time.sleep(0.05)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _kernel_out_of_memory() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not tell."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text("ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
