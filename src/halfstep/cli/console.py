"""Shows the progress of a run on stderr: a line that a terminal rewrites, elsewhere a few lines."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta

from halfstep.trainer.loop import Tick

_LINE_EVERY = 10.0  # seconds between lines where there is no terminal
_WORTH_A_LINE = 50e6  # bytes of data that take seconds to prepare


def megabytes(count: float) -> str:
    """Format bytes as MB (10^6), or as kB where that would be a single digit."""
    return f"{count / 1e6:,.0f} MB" if count >= 9.5e6 else f"{count / 1e3:,.0f} kB"


class RunDisplay:
    """Shows the preparation of data and the training on stderr; a context manager."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._terminal = sys.stderr.isatty()
        self._last_line = 0.0

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._print("")

    def say(self, text: str) -> None:
        """Print a line that stays, where the progress line is written over."""
        self._print(f"{text}\n")

    def prepared(self, what: str, done: int, total: int) -> None:
        """Show the progress of preparing data, in bytes."""
        if 0 < done < total and total > _WORTH_A_LINE:
            self._progress(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def stepped(self, tick: Tick, max_steps: int) -> None:
        """Show one step of training."""
        record = tick.record
        parts = [f"step {record.step}/{max_steps}", f"loss {record.loss:.3f}"]
        if record.loss_scale is not None and record.loss_scale != 1:
            parts.append(f"scale 2^{record.loss_scale.hex().split('p')[1].lstrip('+')}")
        if record.skipped_total:
            parts.append(f"skipped {record.skipped_total}")
        parts.append(f"{record.tokens_per_second:,.0f} tok/s")
        each = (record.tokens or 0) / record.step / (record.tokens_per_second or 1.0)
        parts.append(f"{timedelta(seconds=round(each * (max_steps - record.step)))} left")
        if not record.applied:
            few = " (a few are normal: a dynamic loss scale finds its level so)"
            self.say(
                f"step {record.step}: skipped ({record.skip_reason}) at loss scale "
                f"{record.loss_scale:g}{few * (record.skipped_total == 1)}"
            )
        for said in [*tick.verdicts, *([tick.evaluation.text] if tick.evaluation else [])]:
            self.say(f"step {record.step}: {said}")
        self._progress(f"{self._title}: {'  '.join(parts)}")

    def _progress(self, text: str) -> None:
        """Rewrite the line; without a terminal print another one, but not often."""
        now = time.monotonic()
        if self._terminal:
            self._print(text[:100])
        elif now - self._last_line >= _LINE_EVERY:
            self._last_line = now
            self.say(text)

    def _print(self, text: str) -> None:
        if not self._quiet:
            again = "\r\x1b[K" if self._terminal else ""
            with suppress(OSError):  # a closed pipe does not end the training
                print(f"{again}{text}", end="", file=sys.stderr, flush=True)
