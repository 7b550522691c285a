"""The batches around each finite spike, written down so that a later run can leave them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from halfstep.diagnostics.recording.metrics import append_line, keep_lines
from halfstep.precision.recovery import OnSpike
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.spikes import Spiking

EXCLUDE = "exclude.jsonl"

Rows = Callable[[int], Mapping[str, Any]]
"""Names the batch of a step, numbered as in ``metrics.jsonl``: under what it is, where it is."""


class Excluded:
    """Writes one line for each batch of a spike's window to ``exclude.jsonl``.

    The window is the spiking step and, where a rollback undid some, the applied steps before it.
    """

    def __init__(self, folder: Path, rows: Rows, choice: OnSpike, *, last_step: int) -> None:
        """Drop the lines of spikes after ``last_step``: a resumed run takes those steps again."""
        self._path, self._rows = folder / EXCLUDE, rows
        undone = choice.count if choice.action == "rollback" else 0
        self._applied: deque[int] = deque(maxlen=undone)
        self._guarded = choice.action != "off"
        if self._guarded and self._path.exists():
            keep_lines(self._path, last_step, "spike_step")

    def stepped(self, step: int, result: StepResult) -> None:
        """Note a step, numbered as in ``metrics.jsonl``; write its window if it spiked."""
        if not self._guarded:
            return
        if result.applied:
            self._applied.append(step)
        elif result.reason in get_args(Spiking):
            count = min(result.steps_undone, len(self._applied))
            self.spiked(step, str(result.reason), [self._applied.pop() for _ in range(count)])

    def spiked(self, step: int, reason: str, undone: list[int] | None = None) -> None:
        """Write a spiking step, and the applied ones that were undone with it.

        Raises:
            CheckpointError: If the file cannot be written.
        """
        for number in sorted([step, *(undone or [])]):
            batch = self._rows(number)
            line = {"step": number, "spike_step": step, "reason": reason, **batch}
            append_line(self._path, line)
