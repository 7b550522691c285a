"""Shows the progress of a run: a progress bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from halfstep.trainer.loop import Tick

_LINE_EVERY = 10.0  # seconds between lines where there is no terminal
_WORTH_A_LINE = 50e6  # bytes of data that take seconds to prepare


def duration(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(count: float) -> str:
    """Format bytes as MB (10^6), or as kB where that would be a single digit."""
    return f"{count / 1e6:,.0f} MB" if count >= 9.5e6 else f"{count / 1e3:,.0f} kB"


class _Console(Console):
    """A console that goes silent when its pipe is closed, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, and let training go on."""
        self.quiet = True


class RunDisplay:
    """Shows the preparation of data and the training on stderr; a context manager."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title = title
        self._console = _Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line = 0.0

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False)

    def prepared(self, what: str, done: int, total: int) -> None:
        """Show the progress of preparing data, in bytes."""
        text = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
        self._show(what, done, total, text)
        if not self._console.is_terminal and 0 < done < total and total > _WORTH_A_LINE:
            self._line(f"{what}: {text}")

    def stepped(self, tick: Tick, max_steps: int) -> None:
        """Show one step of training."""
        record = tick.record
        parts = [f"step {record.step}/{max_steps}", f"loss {record.loss:.3f}"]
        if record.loss_scale is not None and record.loss_scale != 1:
            power = record.loss_scale.hex().split("p")[1].lstrip("+")
            parts.append(f"scale 2^{power}")
        if record.skipped_total:
            parts.append(f"skipped {record.skipped_total}")
        parts.append(f"{record.tokens_per_second:,.0f} tok/s")
        parts.append(f"{duration(tick.seconds_left)} left")
        text = "  ".join(parts)
        self._show(self._title, record.step, max_steps, text)
        if not record.applied:
            few = (
                " (a few are normal: a dynamic loss scale finds its level so)"
                if record.skipped_total == 1
                else ""
            )
            scale, reason = record.loss_scale, record.skip_reason
            self.say(f"step {record.step}: skipped ({reason}) at loss scale {scale:g}{few}")
        for said in [*tick.verdicts, *([tick.evaluation.text] if tick.evaluation else [])]:
            self.say(f"step {record.step}: {said}")
        if not self._console.is_terminal:
            self._line(f"{self._title}: {text}")

    def _show(self, key: str, done: int, total: int, text: str) -> None:
        if key not in self._tasks:
            for old in self._tasks.values():
                self._progress.remove_task(old)
            self._tasks = {key: self._progress.add_task(key, total=total, text="")}
        self._progress.update(self._tasks[key], completed=done, total=total, text=text)

    def _line(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY:
            self._last_line = now
            self.say(text)
