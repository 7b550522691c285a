"""Recognises a machine whose cores other programs use, by how long this process's threads wait.

The work of a step is cut into equal parts, one for each thread, and each part ends with all of them
at a barrier. A thread that has to share its core delays the others at every barrier, which OpenMP
lets them spend spinning, on a core that somebody else could use: docs/troubleshooting.md has
figures. The time of a step, the processor time and the load average cannot tell such a machine from
a large model; the scheduler can, which knows for each thread how long it was ready and had no core.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from halfstep.words import Told, said

_told = Told("halfstep.trainer")

BUSY = 0.2
"""Share of the time that a thread waits for a core from which a machine counts as busy. Of two
threads on two idle cores it was 0.04 at most, with one neighbour 0.33 to 0.66."""
WINDOW_SECONDS = 10.0
"""A run is told after two such spans, one after the other, in which its machine was busy: a save or
another program's start is none of them."""

_THREADS = Path("/proc/self/task")


class Waiting:
    """Measures from its construction on how long this process's threads wait for a core."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._before = seconds_waited()

    @property
    def seconds(self) -> float:
        """Seconds since then."""
        return time.perf_counter() - self._started

    def share(self) -> float | None:
        """Return the share of the time since then in which the thread that waited most did so.

        Returns:
            0 to 1; None where the system does not tell, as on macOS.
        """
        seconds, now = self.seconds, seconds_waited()
        if not now or seconds <= 0:
            return None
        most = max(waited - self._before.get(thread, 0.0) for thread, waited in now.items())
        return min(1.0, max(0.0, most / seconds))


class Watch:
    """Tells once, while a run goes on, that its machine is busy: when it has been for a while."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._waiting = Waiting()
        self._said = ""
        self._told = False

    def look(self) -> str:
        """Return the remark for the user, at most once; call it after each step."""
        if self._told or self._waiting.seconds < WINDOW_SECONDS:
            return ""
        before, self._said = self._said, remark(self._waiting.share(), self._threads)
        self._waiting = Waiting()
        self._told = bool(before and self._said)
        return self._said if self._told else ""


def probe(seconds: float = 0.5) -> float | None:
    """Keep all of torch's threads at work for a moment, and return :meth:`Waiting.share` of it."""
    a = torch.ones(512, 512)
    a @ a  # starts the threads
    waiting = Waiting()
    while waiting.seconds < seconds:
        a @ a
    return waiting.share()


def seconds_waited() -> dict[str, float]:
    """Return how long each thread of this process has been ready to run without a core.

    **Source:** the kernel's Documentation/scheduler/sched-stats.rst: the second number of
    ``schedstat`` is the time spent waiting on a runqueue, in nanoseconds.

    Returns:
        Thread number to seconds since its start; empty where the system does not tell.
    """
    found = {}
    try:
        for thread in os.listdir(_THREADS):
            try:
                text = (_THREADS / thread / "schedstat").read_text(encoding="ascii")
            except OSError:  # the thread has ended
                continue
            found[thread] = int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return {}
    return found


def remark(share: float | None, threads: int) -> str:
    """Say that the machine is busy, as :func:`busy` finds it, in the language spoken."""
    return said(busy(share, threads))


def busy(share: float | None, threads: int) -> str:
    """That the machine is busy, and what helps; empty if it is not, or if nobody knows.

    Args:
        share: As :meth:`Waiting.share` returns it.
        threads: Threads that torch computes with.
    """
    if share is None or share < BUSY:
        return ""
    waits = _told.phrase("busy", share=share)
    if threads == 1:
        return _told.phrase("busy_one", busy=waits)
    return _told.phrase("busy_several", busy=waits, threads=threads // 2)
