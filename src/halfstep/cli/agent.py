"""torchrun's agent, extended to print each attempt's failures once, with the cause.

It also does not restart a run that was refused, stopped by a numerics guard or saved after a
signal. torch's launcher has no option for either.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from halfstep.cli.outcome import FOLDER, INTERRUPTED, Outcome, read_outcomes
from halfstep.cli.words import told
from halfstep.errors import PeerError

# 2 refused, 3 numerics guard, 4 saved after a signal, 130 Ctrl-C: a restart would not help
FINAL = {2, 3, INTERRUPTED, 130}
# The agent gives ranks 30 s to end after SIGTERM; one that it kills later than this was hung.
_HUNG_SECONDS = 20
_SECONDS_TO_DIE = 5.0
LOOPBACK = "loopback"
"""The name under which torch's launcher finds :class:`Loopback`."""


class Ended(Exception):
    """The run is over with a non-zero exit code, and its messages have been printed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Loopback(StaticTCPRendezvous):
    """The rendezvous of one machine's ranks: a store that only this machine can reach.

    torchrun's own for one machine listens on every network interface, without any password.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        super().__init__("127.0.0.1", port, 0, 1, parameters.run_id, timeout=60)
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        """Return the name under which torch registers this rendezvous, like "static" or "c10d"."""
        return LOOPBACK


class Agent(LocalElasticAgent):
    """torchrun's agent for one machine's ranks, which prints failures and decides on restarts."""

    def __init__(self, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._folder = Path(os.environ[FOLDER])
        self._attempts = spec.max_restarts + 1
        self._attempt = 1
        self._size = 0

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Watch the ranks to their end; raise on None, which means that the run ended elsewhere."""
        result: RunResult | None = super().run(role)
        if result is None:
            raise PeerError("the run ended on another machine; its message there tells why")
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for file in self._folder.glob("rank*.json"):  # left by the attempt before
            file.unlink()
        self._size = worker_group.workers[0].world_size
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        said = read_outcomes(self._folder)
        causes = [_cause(rank, one, said.get(rank)) for rank, one in result.failures.items()]
        code = report(causes, self._size, self._attempt, self._attempts)
        if code in FINAL or self._attempt == self._attempts:
            raise Ended(code)
        self._attempt += 1
        return result

    def _shutdown(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._shutdown(*arguments, **options)
        except SignalException as second:  # while the ranks were given time to save
            self._end_now(int(second.sigval))
            raise

    def _end_now(self, number: int) -> None:
        """End the remaining ranks: send the signal once more, which torch does not, then kill."""
        for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(handled, signal.SIG_IGN)
        left = {worker.id for worker in self.get_worker_group().workers}
        for each in (number, signal.SIGKILL):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.killpg(pid, each)  # each rank leads its own process group
            end = time.monotonic() + _SECONDS_TO_DIE
            while left and time.monotonic() < end:
                left = {pid for pid in left if not _ended(pid)}
                time.sleep(0.05)


def report(causes: list[Outcome], size: int, attempt: int = 0, attempts: int = 0) -> int:
    """Print each root cause once, and return the exit code of the first one.

    Args:
        causes: Why ranks ended, one at least.
        size: Ranks of the run; a message that all of them have is printed without their numbers.
        attempt: Number of this attempt, from 1; 0 if no other can follow.
        attempts: The most attempts that there may be.
    """
    first = min(cause.time for cause in causes)
    roots = [cause for cause in causes if not cause.follows] or causes
    roots = [cause for cause in roots if cause.code != INTERRUPTED] or roots
    roots = sorted(roots, key=lambda cause: (cause.time, cause.rank))
    suffix = ""
    if roots[0].code not in FINAL and attempts == 1:
        suffix = "; go on from the last checkpoint with --resume, or let -- --max-restarts N do"
    elif roots[0].code not in FINAL and attempts:
        suffix = f" (attempt {attempt} of {attempts})" + "; starting again" * (attempt < attempts)
    lines: dict[str, list[int]] = {}
    for cause in roots:
        message = cause.message
        if message.endswith("by SIGKILL") and cause.time > first + _HUNG_SECONDS:
            message = " did not answer, and was killed"
        lines.setdefault(message, []).append(cause.rank)
    for message, ranks in lines.items():
        who = f"rank {', '.join(map(str, sorted(ranks)))}" + ":" * (message[:1] != " ") + " "
        alike = len(ranks) == size and message[:1] != " "
        if message:
            text = message if alike else who + message.lstrip()
            print(told("error", message=text + suffix), file=sys.stderr)
    return roots[0].code


def _cause(rank: int, failure: Any, said: Outcome | None) -> Outcome:
    """Return why a rank ended; a message with a leading space is about the rank, not from it."""
    if said is not None and said.code:
        return said
    if failure.exitcode >= 0:
        message = f" ended with exit code {failure.exitcode} and said nothing"
        return Outcome(rank, 1, message, False, failure.timestamp)
    name = f"signal {-failure.exitcode}"
    with suppress(ValueError):
        name = signal.Signals(-failure.exitcode).name
    follows = name == "SIGTERM"  # the agent sends it when another rank has failed
    return Outcome(rank, 1, f" was killed by {name}", follows, failure.timestamp)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
