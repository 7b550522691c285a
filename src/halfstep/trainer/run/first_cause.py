"""Names the first cause of a step that was not finite, by running its batch again.

Precision calls :class:`CauseSearch` before it recovers from such a step, so weights, optimizer
state and loss scale are those of the step, and so are the dropout seeds. It searches

- where no loss scale can help, whether the run stops, skips or rolls back then;
- at the third skip in a row, which a loss scale seldom needs once it has found its level;
- whenever the scale has fallen to a 16th of its level since the last search.

While a scale searches for its level, overflows of the backward are expected and not reported. With
several ranks nothing is searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from halfstep.diagnostics.metrics import CAUSES, append_line, keep_lines
from halfstep.diagnostics.nonfinite.cause import Cause
from halfstep.errors import NonFiniteError
from halfstep.precision.scaling.gradients import Judged
from halfstep.trainer.config.config import load_config, shipped_configs
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.session import Session
from halfstep.trainer.step import Batch, run_micro_batch
from halfstep.trainer.tasks.by_name import part

_SKIPS = 3
"""Skips in a row after which a search begins: a scale that has found its level halves once in a
growth interval, and a gradient seldom grows eightfold from one step to the next."""
_FALL = 16.0
"""A fall of the scale below its level that is searched: four halvings, none regained."""


def _lower_rate(config: BaseConfig) -> float:
    """A tenth of a learning rate at which weights diverged; that of the package's own if lower."""
    lower = config.optimizer.learning_rate / 10
    if config.name not in shipped_configs():
        return lower
    return min(lower, load_config(config.name).optimizer.learning_rate)


class CauseSearch:
    """Searches the first cause of broken steps of a session, while it is entered."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self._path = path
        self._batches: Sequence[Batch] = ()
        self._seeds: Sequence[int] = ()
        self._level = 0.0
        self.judged: Judged | None = None
        """What was measured in the present step, if it was not finite."""
        self.scale = 1.0
        """The loss scale of that step."""
        self.cause: Cause | None = None
        """The first cause of the present step, if it was searched and found."""
        self.failed = ""
        """Why a search in the present step failed."""

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What to report of the present step."""
        return tuple(filter(None, (str(self.cause or ""), self.failed)))

    def __enter__(self) -> CauseSearch:
        file = self._path / CAUSES
        if self._session.world.is_main and file.exists():  # a resumed run writes them again
            keep_lines(file, self._session.step)
        self._session.precision.outcome.on_broken = self._look
        return self

    def __exit__(self, *_: object) -> None:
        self._session.precision.outcome.on_broken = None

    def begin(self, batches: Sequence[Batch], seeds: Sequence[int]) -> None:
        """Remember the micro-batches of the step that begins, and their dropout seeds."""
        self._batches, self._seeds = batches, seeds
        self.judged, self.cause, self.failed = None, None, ""

    def _look(
        self,
        judged: Judged,
        error: NonFiniteError | None,
        scale: float,
        in_a_row: int,
        calibrating: bool,
    ) -> None:
        """Search, if this step calls for it; the arguments are those of ``OnBroken``."""
        self.judged, self.scale = judged, scale
        fallen = not calibrating and scale <= self._level / _FALL
        if not calibrating and (fallen or not self._level):
            self._level = scale
        if self._session.world.size > 1 or (error is None and in_a_row != _SKIPS and not fallen):
            return
        try:
            cause = self._search()
        except (RuntimeError, ValueError, TypeError, LookupError) as failed:
            self.failed = (
                f"looking for the first cause failed ({type(failed).__name__}: {str(failed)[:80]})"
            )
            return
        expected = calibrating and error is None
        if cause is not None and not (expected and cause.cause_class == "overflow in the backward"):
            self.cause = cause
            self._write(cause)

    def _search(self) -> Cause | None:
        session, batches = self._session, self._batches
        precision, strategy = session.precision, session.strategy
        (n,) = strategy.sum([sum(map(session.task.targets, batches))])

        def run(number: int, batch: Batch) -> None:
            with strategy.micro_batch(last=number == len(batches) - 1):
                seed = self._seeds[number] if self._seeds else None
                run_micro_batch(session.loss_sum, precision, batch, n, seed)

        precision.discard()
        search = part("diagnostics.nonfinite.first_cause:search")
        found: Cause | None = search(session.task.model, run, batches, clear=precision.discard)
        return found

    def _write(self, cause: Cause) -> None:
        """Append the cause to ``causes.jsonl``."""
        line = {"step": self._session.step + 1, "loss_scale": self.scale, **cause.to_json()}
        line["text"] = str(cause)
        append_line(self._path / CAUSES, line)

    def next_command(self) -> str:
        """The command to type next, as a sentence; empty where only code can be changed."""
        config, cause = self._session.config, self.cause
        command = getattr(config, "COMMAND", "")
        if cause is None or not command:
            return ""
        path = str(self._path)
        resumed = f"halfstep {command} --resume --output-dir {quote(path)}"
        if cause.change == "range":
            return f"try: {resumed} --precision bf16-mixed"
        if cause.change == "data":
            return f"try: {resumed} --on-nonfinite skip:1"
        if cause.change == "rate":
            fresh = f"halfstep {command} --config {quote(str(self._path / 'config.toml'))}"
            lower = _lower_rate(config)
            other = quote(f"{path}-lower-rate")
            changed = f"{fresh} --output-dir {other} --learning-rate {lower:g}"
            return f"try: {changed}"
        return ""
