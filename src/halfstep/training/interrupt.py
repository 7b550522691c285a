"""SIGTERM and Ctrl-C as a request that the loop honours between two steps."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

REPEAT_SECONDS = 1.0
"""A launcher hands on what the terminal or the process group has sent to its ranks already."""


class Interrupt:
    """While entered, the first SIGTERM or SIGINT only sets ``requested``.

    Another within ``REPEAT_SECONDS`` is the same one, which came twice, even if the block has ended
    by then. A later one acts at once: the old handlers come back with it, or else when the block
    ends.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._first = 0.0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._may_repeat():
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = signal.Signals(number).name
            self._first = time.monotonic()
        elif not self._may_repeat():
            self._restore()
            signal.raise_signal(number)

    def _may_repeat(self) -> bool:
        return bool(self.requested) and time.monotonic() - self._first < REPEAT_SECONDS

    def _restore(self) -> None:
        while self._old:
            number, handler = self._old.popitem()
            signal.signal(number, handler)
