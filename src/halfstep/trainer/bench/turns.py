"""Lets policies take steps in turn, each in a process of its own, within a limit of time.

A process of its own has a peak memory of its own. Turns make a neighbour's load hit all alike::

    start       every process at once: importing torch takes longest
    open        one after the other: model, data and two steps, which tell its speed and memory
    drop        rows so slow that the others could not take enough steps
    turns       one step each, again and again, until the time or the steps are over

Where memory does not hold all of them at once, as many as it holds take turns, then the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.bench.row import REFUSED, StepLine, config_of_row
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.memory import free_bytes
from halfstep.words import Phrase, Told, message

_told = Told("halfstep.trainer.bench")

Say = Callable[[str], None]

WARM_UP = 3
"""First steps of a row, which do not count: they allocate, compile and fill caches."""
LEAST = 6
"""Counted steps without which quartiles say nothing."""
_SLOW = 3.0
"""A row may be dropped if its step takes this many times the fastest row's."""
_ROOM = 1.25
"""The memory of a row, as a multiple of what its first steps took."""
_SAY_SECONDS = 10.0


class Ended(Exception):
    """A row's process has ended, or did not answer in time; the message says why."""


@dataclass(slots=True)
class Row:
    """A policy in a measurement, and its steps."""

    policy: PrecisionPolicy
    why_not: str = ""
    """Why there is nothing to compare; empty for a row that was measured."""
    opened: Mapping[str, Any] = field(default_factory=dict)
    """What its process opened: ``summary`` of model and data, ``support``, ``threads``."""
    steps: list[StepLine] = field(default_factory=list)

    @property
    def timed(self) -> list[StepLine]:
        """The steps whose times count: after the warm-up, and without those the meter slowed."""
        return [step for step in self.steps[WARM_UP:] if step.lost is None]


class _Process:
    """A row's process, which waits for its turn."""

    def __init__(self, row: Row, order: Mapping[str, Any]) -> None:
        self.row = row
        self._order = order
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        safe = [] if os.getcwd() in sys.path else ["-P"]  # the module path of this process
        self._child = subprocess.Popen(
            [sys.executable, *safe, "-m", "halfstep.trainer.bench.row"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self._read = b""

    def load(self, until: float) -> None:
        """Wait until Python and torch are loaded, which every process begins at once."""
        self._answer(until, _told.phrase("not_loaded"))

    def open(self, until: float) -> None:
        """Open the run, and take two steps."""
        self._tell(json.dumps(self._order))
        found = self._answer(until, _told.phrase("not_ready"))
        self.row.opened = {key: _text(value) for key, value in found.items()}
        for _ in range(2):
            self.step(until)

    def step(self, until: float) -> None:
        """Take one step."""
        self._tell("go")
        found = self._answer(until, _told.phrase("not_done", step=len(self.row.steps) + 1))
        self.row.steps.append(StepLine(**found))

    def close(self) -> None:
        """End the process, whatever it does."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._log):
            with suppress(OSError):  # what it did not read any more
                stream.close()  # type: ignore[union-attr]

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # its end is told by the answer that does not come
            self._child.stdin.write(f"{line}\n".encode())
            self._child.stdin.flush()

    def _answer(self, until: float, late: str) -> dict[str, Any]:
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        asked = time.monotonic()
        while b"\n" not in self._read:
            if not wait([descriptor], max(0.0, until - time.monotonic())):
                seconds = time.monotonic() - asked
                raise Ended(_told.phrase("late", what=late, seconds=seconds))
            more = os.read(descriptor, 1 << 16)
            if not more:
                raise Ended(self._end())
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if REFUSED in found:
            raise Ended(_text(found[REFUSED]))
        return found

    def _end(self) -> str:
        code = self._child.wait()
        if code == -signal.SIGKILL:
            return _told.phrase("killed")
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        if not lines:
            return _told.phrase("ended_silently", code=code)
        return _told.phrase("ended", code=code, last=lines[-1])


def take_turns(
    config: BaseConfig,
    policies: Sequence[PrecisionPolicy],
    device: torch.device,
    folder: Path,
    *,
    steps: int,
    until: float,
    say: Say,
) -> tuple[list[Row], bool]:
    """Measure each policy; the first is what the others are compared with.

    Args:
        config: The run to measure.
        policies: Different ones.
        device: Where they run.
        folder: An existing folder for what they write.
        steps: The most steps that count; 0: as many as there is time for.
        until: When to end, by ``time.monotonic``.
        say: Prints a line of progress.

    Returns:
        A row for each policy, and whether all took turns: not if memory held only some at once.
    """
    rows = [Row(policy) for policy in policies]
    processes: list[_Process] = []
    try:
        for row in rows:
            try:
                require_support(row.policy, device)
            except PrecisionError as error:
                row.why_not = message(error)
                continue
            here = str(folder / f"row{len(processes)}")
            table = config_to_table(config_of_row(config, row.policy))
            processes.append(_Process(row, {"config": table, "folder": here}))
        together = True
        left = list(processes)
        while left:
            group = list(_opened(left, device, until, say))
            left = [p for p in left if p not in group and not p.row.why_not]
            together &= not left
            ends = _share(until, len(group), len(group) + len(left))
            _measure(_quick(group, ends), steps, ends, say)
            for process in group:
                process.close()
        return rows, together
    finally:
        for process in processes:
            process.close()


def _text(value: Any) -> Any:
    """What a process told: a text in each language, or something else, as it is."""
    return Phrase.of(value) if isinstance(value, dict) else value


def _share(until: float, part: int, whole: int) -> float:
    """Return when ``part`` of ``whole`` rows end, of which each has as much time."""
    now = time.monotonic()
    return now + (until - now) * part / max(1, whole)


def _opened(
    left: Sequence[_Process], device: torch.device, until: float, say: Say
) -> Iterator[_Process]:
    """Open rows for as long as there is memory for one more, one at least."""
    for number, process in enumerate(left):
        row = process.row
        if _open(process, len(left) - number, until):
            known = {"policy": str(row.policy), "support": row.opened["support"]}
            say(_told("opened", seconds=_pace(process), **known))
            yield process
            if free_bytes(device) < row.steps[-1].peak_memory_bytes * _ROOM:
                return
        else:
            say(_told("not_opened", policy=str(row.policy), why=row.why_not))


def _pace(process: _Process) -> float:
    """Return the seconds of a row's last two steps' faster one: a neighbour may slow the other."""
    return min(step.seconds for step in process.row.steps[-2:])


def _open(process: _Process, left: int, until: float) -> bool:
    """Return whether a row, of ``left``, could be opened; otherwise it says why not."""
    try:
        process.load(until)
        # twice its share at most, as what is left is needed for the turns
        process.open(min(until, _share(until, 2, left + 1)))
    except Ended as end:
        process.row.why_not = message(end)
        process.close()
    return not process.row.why_not


def _quick(group: list[_Process], until: float) -> list[_Process]:
    """Leave out rows without which the others can take enough steps, the slowest first.

    The first is kept, which the others are compared with.
    """
    kept = list(group)
    while kept:
        left, needed = until - time.monotonic(), WARM_UP - 2 + LEAST + 1  # one for the meter
        times = {id(p): _pace(p) for p in kept}
        slow = [p for p in kept[1:] if times[id(p)] > _SLOW * min(times.values())]
        if not slow or needed * sum(times.values()) <= left:
            break
        slowest = max(slow, key=lambda p: times[id(p)])
        kept.remove(slowest)
        seconds = needed * sum(times.values())
        took = times[id(slowest)]
        slowest.row.why_not = _told.phrase("too_slow", took=took, least=LEAST, seconds=seconds)
        slowest.close()
    return kept


def _measure(group: list[_Process], steps: int, until: float, say: Say) -> None:
    """Take steps in turn."""
    told = time.monotonic()
    while group:
        now = time.monotonic()
        if now + sum(map(_pace, group)) * 1.1 > until:
            return
        if steps and len(group[0].row.timed) >= steps:
            return
        for process in list(group):
            try:
                process.step(until)
            except Ended as end:
                if time.monotonic() >= until:
                    return
                process.row.why_not = message(end)
                process.close()
                group.remove(process)
        if now - told > _SAY_SECONDS:
            told = now
            say(_told("steps_each", steps=len(group[0].row.steps) if group else 0))
