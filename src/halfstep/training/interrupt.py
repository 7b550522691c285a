"""SIGTERM and Ctrl-C as a request that the loop honours between two steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While entered, the first SIGTERM or SIGINT only sets ``requested``.

    The old handlers come back with that first signal, so a second one acts at once, and when the
    block ends.
    """

    def __init__(self) -> None:
        self.requested = ""
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
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._old:
            number, handler = self._old.popitem()
            signal.signal(number, handler)
