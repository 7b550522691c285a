"""The training loop: a generator that yields what each step did."""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.lost_updates import LOUD, GroupReport, LostUpdateMeter, lost_share
from halfstep.diagnostics.metrics import (
    CAUSES,
    HEALTH,
    METRICS,
    NEWEST,
    NUMERICS,
    Record,
    append_line,
    keep_lines,
    write_waiting,
)
from halfstep.errors import (
    CheckpointError,
    HalfstepError,
    NonFiniteError,
    SpikeError,
    StorageError,
)
from halfstep.files import write_whole
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import Judged
from halfstep.shown import typed
from halfstep.trainer import part
from halfstep.trainer.checkpoint import (
    Save,
    folders_of,
    reached,
    save_checkpoint,
)
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import peak_memory_bytes
from halfstep.trainer.session import Session
from halfstep.trainer.step import (
    Batch,
    Evaluation,
    MicroBatches,
    run_micro_batch,
    seed_dropout,
    to_device,
)

if TYPE_CHECKING:
    from halfstep.diagnostics.nonfinite.cause import Cause

STILL_SECONDS = 1.0
"""How long training may stand still for a save; then the disk is waited for in the background."""
STOPS = ("", "stop", "SIGINT", "SIGTERM")
"""Reasons why a run ends before its last step; where ranks differ, the later entry wins."""


@dataclass(frozen=True, slots=True)
class Tick:
    """What the loop yields after each step.

    Attributes:
        record: The line that went into ``metrics.jsonl``.
        evaluation: The validation result, if the step ended with one.
        checkpoints: Those that are complete since the last tick: they are saved in the background,
            while training goes on.
        stopped_by: Empty, or why this is the last step: a signal's name, or a callback's
            ``"stop"``.
        verdicts: The first cause of a step that was not finite, the lost-update meter's
            warnings, once per parameter group and process, and the layer that leaves its own past.
    """

    record: Record
    evaluation: Evaluation | None
    checkpoints: tuple[Path, ...]
    stopped_by: str
    verdicts: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Path | None:
        """The newest of the checkpoints, if there is one."""
        return self.checkpoints[-1] if self.checkpoints else None


def train(session: Session, path: Path) -> Iterator[Tick]:
    """Train to the end of the run, or until a signal; yield after every step.

    Rank 0 writes metrics before each yield; all ranks save a checkpoint every ``save_every`` steps
    and at the end, and must iterate together. Outside the main thread, where Python allows no
    signal handlers, no signal ends the run early.

    On CUDA the outcome of a step is read while the device works on the next one, so its line, its
    tick and its error come that much later; not where an evaluation or a checkpoint follows.

    Raises:
        NonFiniteError: When a numerics guard stops the run; the last checkpoint is intact.
        SpikeError: The same, when it stops at a finite spike.
        PrecisionError: When ranks no longer train the same model.
        CheckpointError: When metrics or a checkpoint cannot be written.
    """
    settings = session.config.run
    books = _Books(session, path)
    with (
        Interrupt() as interrupt,
        closing(_Losses(session)) as losses,
        closing(books),
        _observed(session, path, books.news),
        CauseSearch(session, path) as causes,
    ):
        while session.step < settings.max_steps:
            taken = _take_step(session, books, causes)
            reason = interrupt.requested or ("stop" if session.stop_asked else "")
            stopped_by = STOPS[session.world.largest(STOPS.index(reason))]  # on all ranks
            books.look()
            finished = session.step == settings.max_steps
            last = finished or bool(stopped_by)
            due = _due(session.step, settings.eval_every)
            due |= finished or stopped_by == "stop"
            saves = last or due or _due(session.step, settings.save_every) or bool(books.failed)
            at_once = session.precision.path is None or session.followed
            late = not (at_once or saves or losses.fresh)
            if not late:
                with books.last_words(causes):
                    session.precision.settle()
            yield from books.ticks
            books.ticks = []
            if late:
                books.held = taken
                continue
            tick = books.close_step(taken, causes, losses, due=due, last=last)
            yield replace(tick, stopped_by=stopped_by)
            if last:
                return


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step that was taken: its result, and what else its line says by the record's names."""

    step: int
    result: StepResult
    line: dict[str, Any]


def attempt(session: Session, begun: Callable[..., None] = lambda *_: None) -> StepResult:
    """Take the session's next step, and count nothing; all ranks call it together.

    The loss is the mean over all targets of all ranks' micro-batches. On CUDA the result is read
    later, and what the step before ended with may be raised here. ``begun`` is told the batches and
    seeds before the weights are updated, once the step before is known.
    """
    precision, strategy = session.precision, session.strategy
    made = session.ahead.take(session.step)
    # Divide by the total over all micro-batches and ranks, so that unequal sizes give one mean.
    (n,) = strategy.sum([made.targets])

    def set_rates() -> None:
        for optimizer in precision.optimizers:
            for group in optimizer.param_groups:
                peak = group.setdefault("initial_lr", group["lr"])
                group["lr"] = session.task.learning_rate(peak, session.applied)

    for number, batch in enumerate(made.batches):
        with strategy.micro_batch(last=number == len(made.batches) - 1):
            # Before backward, which may update weights already; and after the first forward, as a
            # rate may depend on the step before: the device has work while the host waits for it.
            first = set_rates if number == 0 else None
            run_micro_batch(session.loss_sum, precision, batch, n, made.seeds[number], first)
    strategy.finish()
    precision.settle()
    begun(made)
    return precision.step(max_norm=session.config.optimizer.max_norm or None)


def _take_step(session: Session, books: _Books, causes: CauseSearch) -> _Taken:
    task, begin = session.task, time.perf_counter()

    def begun(made: MicroBatches) -> None:
        books.tell(causes)
        causes.begin(made)

    with books.last_words(causes):
        result = attempt(session, begun)
    tokens = task.tokens(session.step)
    line: dict[str, Any] = {"learning_rate": session.precision.optimizers[0].param_groups[0]["lr"]}
    session.step += 1
    session.tokens += tokens
    if session.step < session.config.run.max_steps:
        session.ahead.prepare(session.step)  # while the device works on this one
    line["tokens"] = session.tokens
    line["tokens_per_second"] = tokens / (time.perf_counter() - begin)
    return _Taken(session.step, result, line)


class _Books:
    """Writes what a run leaves as it goes: metrics, and checkpoints."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self._path, self._metrics = path, path / METRICS
        self._folders = folders_of(session.config.run, path)
        self._failing_since: float | None = None  # no checkpoint was written since
        self._begun: Save | None = None
        self._saved: list[Path] = []  # which no tick has told
        self._word = ""  # what to say of it when it is complete
        if session.world.is_main:
            keep_lines(self._metrics, session.step)
        self.news: list[str] = []
        """What layer health and saves have to say, for the next tick."""
        self.held: _Taken | None = None
        """A step whose outcome the device has not told."""
        self.failed: CheckpointError | None = None
        """Why a save has failed in the background; that of the next step may succeed."""
        self.ticks: list[Tick] = []
        """Those of held steps that have been told since."""

    def tell(self, causes: CauseSearch) -> None:
        """Write down the held step, which is known now."""
        if self.held is not None:
            self.ticks.append(self._told(self.tick(self.held, causes)))
            self.held = None

    def tick(
        self,
        taken: _Taken,
        causes: CauseSearch,
        evaluation: Evaluation | None = None,
        lost: Sequence[GroupReport] = (),
    ) -> Tick:
        """Write the line of a step whose outcome is known; before a checkpoint of it, if any."""
        record = Record.of(
            taken.step,
            taken.result,
            **taken.line,
            val_loss=evaluation.loss if evaluation else None,
            val_accuracy=evaluation.accuracy if evaluation else None,
            val_macro_f1=evaluation.macro_f1 if evaluation else None,
            val_measures=dict(evaluation.measures) or None if evaluation else None,
            first_cause=causes.cause.summary if causes.cause else None,
            lost_updates={r.group: r.lost for r in lost if math.isfinite(r.lost)} or None,
            peak_memory_bytes=peak_memory_bytes(self._session.device),
        )
        self.write(record)
        return Tick(record, evaluation, (), "", causes.verdicts)

    def _told(self, tick: Tick, *verdicts: str) -> Tick:
        """Add to a tick what saves and layer health have to say."""
        verdicts, checkpoints = (*tick.verdicts, *verdicts, *self.news), tuple(self._saved)
        self.news.clear()
        self._saved.clear()
        return replace(tick, checkpoints=checkpoints, verdicts=verdicts)

    def close_step(
        self, taken: _Taken, causes: CauseSearch, losses: _Losses, *, due: bool, last: bool
    ) -> Tick:
        """Evaluate if that is due, write the step down, and save; its outcome is known."""
        session, evaluation, better = self._session, None, False
        before, kept = session.best, False
        run, keeps_best = session.config.run, session.task.keeps_best
        if due and session.task.evaluates:
            evaluation = session.evaluate()
            better = session.note(evaluation)
        lost = losses.report() if losses.fresh and taken.result.applied else ()
        tick = self.tick(taken, causes, evaluation, lost)
        best = better and keeps_best
        due = _due(session.step, run.save_every) or bool(self.failed)
        if last or due or (evaluation is not None and keeps_best):
            try:
                kept = self._save(last=last, waits=last or best)
            finally:
                if best and not kept:  # what no checkpoint holds; that of the best before stays
                    session.best = before
        if best and kept:
            session.world.main_only(lambda: session.report_best(self._path))
        return self._told(tick, *losses.verdicts(lost, taken))

    def write(self, record: Record) -> None:
        """Append a step to the metrics file, which rank 0 writes."""
        if self._session.world.is_main:
            append_line(self._metrics, record.line())

    def look(self, seconds: float | None = 0.0) -> None:
        """Complete the save that was begun, as :meth:`_complete` does; a later one may succeed."""
        try:
            self._complete(seconds)
        except CheckpointError as error:
            self.failed = error
            self._failing_since = self._failing_since or time.monotonic()

    def close(self) -> None:
        """At the end of a run, however it ends: other ranks may have ended already."""
        if self._begun:
            try:
                self._begun.alone()
            except RuntimeError as error:  # which is worth less than the one that ends the run
                warnings.warn(str(error), stacklevel=2)

    def _complete(self, seconds: float | None = None) -> None:
        """Complete the save that was begun; not if in some seconds the disk has not all of it."""
        begun, world = self._begun, self._session.world
        if begun is None:
            return
        if seconds is not None and world.largest(len(wait(begun.lasting, seconds).not_done)):
            return
        self._begun = None
        self._saved.append(begun.complete())
        self._failing_since = None
        self.news += filter(None, [self._word])
        if world.is_main:
            with suppress(OSError):  # without it, a resume cannot tell that a disk is missing
                write_whole(self._path / NEWEST, f"{begun.final}\n")

    def _save(self, *, last: bool, waits: bool) -> bool:
        """Save a checkpoint, in the background unless it ``waits`` for that; return if it did.

        Raises:
            CheckpointError: If none can be written, and the run may not go on without.
        """
        session, run, begun_at = self._session, self._session.config.run, time.monotonic()
        self.look(None)
        failed, self.failed = [self.failed] if self.failed else [], None
        session.precision.ranks.agree()  # never save ranks that disagree
        spared = session.best.step if session.best and session.task.keeps_best else None
        state = session.checkpoint()
        for folder in self._folders:
            try:
                self._begun = save_checkpoint(
                    folder, session.step, state, run.keep, session.world, spared, waits=False
                )
                where = "AGAIN" if folder == self._folders[0] else "IN THE SECOND FOLDER"
                self._word = f"SAVED {where}, as {self._begun.final}: {failed[0]}" if failed else ""
                left = begun_at + STILL_SECONDS - time.monotonic()
                # After a failure the disk is waited for: unseen, it would fail again and again.
                self._complete(None if waits or self._failing_since else max(left, 0.0))
            except CheckpointError as error:
                failed.append(error)
                continue
            return True
        passing = any(isinstance(error, StorageError) for error in failed)  # a later save may do
        text = "; ".join(map(str, failed)) + ". Free space"
        text += "" if run.second_dir else ", or name another folder by --second-dir"
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        left = self._failing_since + run.save_deadline - now
        over = last or left <= 0 or not passing
        if session.world.largest(int(over)):
            raise (StorageError if passing else CheckpointError)(text) from failed[-1]
        self.news.append(
            f"NOT SAVED: {text}. Training goes on, tries again at the next save, and ends with "
            f"code {StorageError.exit_code} if none is written in {left:.0f} s (run.save_deadline)"
        )
        return False

    @contextmanager
    def last_words(self, causes: CauseSearch) -> Iterator[None]:
        """Record why the run stops, and name the cause and the last checkpoint in the message."""
        try:
            yield
        except (NonFiniteError, SpikeError) as error:
            self._session.precision.ranks.agree()  # else the numbers are only what came of it
            self._stopped(error, causes)
            raise

    def _stopped(self, error: NonFiniteError | SpikeError, causes: CauseSearch) -> None:
        step, world, also = causes.step, self._session.world, ""
        judged, cause = causes.judged, causes.cause
        record = Record(
            step=step,
            applied=False,
            loss=judged.loss if judged else None,
            grad_norm=judged.norm if judged else None,
            loss_scale=causes.scale if judged else None,
            learning_rate=causes.rate,
            skip_reason=error.cause,
            first_cause=cause.summary if cause else None,
        )
        try:
            self.write(record)
        except HalfstepError as failed:  # report the first cause; this goes at its end
            also += f"; {failed}"
        self.look(None)
        also += f"; {self.failed}" if self.failed else ""
        # rank 0 writes metrics and completes checkpoints
        kept = reached(self._folders)[0] if world.is_main else []
        last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint had been written"
        last = world.share(last + also)
        error.args = (f"step {step}: {error.args[0]}; {last}{causes.failed}",)
        error.typed = ""
        if isinstance(error, NonFiniteError):
            error.first_cause = cause
            error.typed = self._typed(cause, causes.rate, resume=last.startswith("the last"))

    def _typed(self, cause: Cause | None, rate: float, *, resume: bool) -> str:
        """What to type after a run that has stopped at what is not finite."""
        if cause.diverged if cause else self._session.precision.outcome.progress.slower():
            key, value, resume = "learning_rate", f"{rate / 10:.1g}", False
        elif cause and cause.fits_fp32:
            key, value = "precision", "bf16-mixed"
        elif cause and cause.samples:
            key, value = "on_nonfinite", "skip:3"
        else:
            return f"halfstep report {self._path}" if cause else ""
        return way_on(self._session.config, resume, **{key: value})


class _Losses(LostUpdateMeter):
    """The lost-update meter, and which of its warnings have already been given."""

    def __init__(self, session: Session) -> None:
        run = session.config.run
        # rank 0 measures, on the parts of the weights that it holds itself
        every = run.lost_update_every if session.world.is_main else 0
        super().__init__(session.precision, every, start=session.applied)
        self._session = session
        self._rates_and_shares: dict[str, list[tuple[float, float]]] = {}  # by group
        self._told: set[str] = set()

    def verdicts(self, reports: Sequence[GroupReport], taken: _Taken) -> tuple[str, ...]:
        """Return warnings for groups that lose many updates of a better policy, once per group."""
        peak = self._session.precision.optimizers[0].param_groups[0]["initial_lr"]
        loud = []
        for report in reports:
            measured = self._rates_and_shares.setdefault(report.group, [])
            measured.append((taken.line["learning_rate"], report.lost))
            loses = report.lost > LOUD and lost_share(measured, peak) > LOUD
            loud += [report] if loses and report.advice and report.group not in self._told else []
        self._told |= {report.group for report in loud}
        return tuple(f"{report.group}: {report.verdict}" for report in loud)


_SKIPS = 3
"""Skips in a row after which a search begins: a scale that has found its level halves once in a
growth interval, and a gradient seldom grows eightfold from one step to the next."""


class CauseSearch:
    """Names the first cause of a step that was not finite, by running its batch again.

    Precision calls it, while it is entered, before it recovers from such a step, so weights,
    optimizer state and loss scale are those of the step, and so are the dropout seeds. It searches
    where no loss scale can help, whether the run stops or skips then, and at the third skip in a
    row. While a scale searches for its level, overflows of the backward are expected and not
    reported. With several ranks nothing is searched.
    """

    def __init__(self, session: Session, path: Path) -> None:
        self._session, self._path = session, path
        self.begin(MicroBatches([], [], 0.0))

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What to report of the present step."""
        return tuple(filter(None, (str(self.cause or ""), self.failed.removeprefix("; "))))

    def __enter__(self) -> CauseSearch:
        file = self._path / CAUSES
        if self._session.world.is_main and file.exists():  # a resumed run writes them again
            keep_lines(file, self._session.step)
        self._session.precision.outcome.on_broken = self._look
        return self

    def __exit__(self, *_: object) -> None:
        self._session.precision.outcome.on_broken = None

    def begin(self, made: MicroBatches) -> None:
        """Remember the micro-batches of the step that is to update the weights, and its rate."""
        self._made = made
        self.step = self._session.step + 1
        self.rate: float = self._session.precision.optimizers[0].param_groups[0]["lr"]
        self.judged: Judged | None = None  # what was measured, if it was not finite
        self.scale = 1.0  # the loss scale then
        self.cause: Cause | None = None
        self.failed = ""  # why a search failed

    def _look(self, judged: Judged, error: NonFiniteError | SpikeError | None) -> None:
        """Search, if this step calls for it; ``error`` says that no loss scale can help."""
        progress = self._session.precision.outcome.progress
        if isinstance(error, SpikeError):
            return
        self.judged, self.scale = judged, progress.loss_scale.value
        if self._session.world.size == 1 and (error or progress.skipped_in_a_row + 1 == _SKIPS):
            cause, self.failed = self._search(progress.slower)
            if cause and (
                error or not progress.calibrating or cause.cause_class != "overflow in the backward"
            ):
                self.cause = cause
                line = {"step": self.step, "loss_scale": self.scale, **cause.to_json()}
                append_line(self._path / CAUSES, {**line, "text": str(cause)})

    def _search(self, slower: Callable[..., str]) -> tuple[Cause | None, str]:
        session, batches, seeds = self._session, self._made.batches, self._made.seeds
        precision, strategy = session.precision, session.strategy
        (n,) = strategy.sum([self._made.targets])

        def run(number: int, batch: Batch) -> None:
            with strategy.micro_batch(last=number == len(batches) - 1):
                run_micro_batch(session.loss_sum, precision, batch, n, seeds[number])

        def wide(number: int, batch: Batch) -> float:
            seed_dropout(seeds[number])
            total, count = session.loss_sum(to_device(batch, precision.device))
            torch.autograd.backward(total / n)
            return (total / count).item()

        found: tuple[Cause | None, str] = part("diagnostics.nonfinite.first_cause:searched")(
            session.task.model, run, batches, clear=precision.discard, slower=slower,
            wide=wide if precision.policy.casts_per_op else None,
        )  # fmt: skip
        return found


@contextmanager
def _observed(session: Session, path: Path, news: list[str]) -> Iterator[None]:
    """Count exponents, and compare each layer with its own past, if the run asks for that."""
    run, given = session.config.run, (session.task.model, session.precision)
    with ExitStack() as stack:
        stack.callback(write_waiting, path)  # here, as a rank ends without Python's own exit
        if run.watch and session.world.is_main:  # rank 0 counts its own numbers
            watch, file = part("diagnostics.statistics.watch:watch"), path / NUMERICS
            stack.enter_context(watch(*given, every=run.watch, to=file, start=session.step))
        if run.health_every:  # all ranks take part
            stack.enter_context(part("diagnostics.health:LayerHealth")(
                *given, every=run.health_every, to=path / HEALTH, start=session.step,
                tell=lambda text: news.append(f"layer health: {text}"),
                outputs=run.compile == "no",
            ))  # fmt: skip
        yield


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def way_on(config: BaseConfig, resume: bool = True, **changes: object) -> str:
    """Return what to type, or write, to go on with a run, or to train it anew, with changes."""
    return typed(config.COMMAND, config_to_table(config)["run"], changes, resume=resume)


# SIGTERM and Ctrl-C are requests that the loop honours between two steps.


REPEAT_SECONDS = 1.0
"""Signals this close are one request: a launcher forwards what the terminal or the process group
has already sent to its ranks."""


class Interrupt:
    """While entered, the first SIGTERM or SIGINT only sets ``requested``.

    Another within ``REPEAT_SECONDS`` counts as the same signal delivered twice, and a later one
    restores the old handlers and acts at once, even if the block has ended by then. Where no signal
    came, the block's end restores them. In another thread than the main one nothing is handled.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._first = 0.0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGINT) if main else ():
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.requested:
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = signal.Signals(number).name
            self._first = time.monotonic()
        elif time.monotonic() - self._first >= REPEAT_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        while self._old:
            number, handler = self._old.popitem()
            signal.signal(number, handler)
