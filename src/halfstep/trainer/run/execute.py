"""Executes a whole run in its folder, for the commands and for :class:`halfstep.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halfstep.errors import NonFiniteError, SpikeError
from halfstep.precision.policy.devices import choose, name_of
from halfstep.report.figures import draw_curves
from halfstep.report.findings import verdict
from halfstep.report.record import read_run
from halfstep.trainer.checkpoint.store import passed_over
from halfstep.trainer.loop import Tick, train
from halfstep.trainer.run.folder import (
    CHECKPOINTS,
    create_run,
    finish_run,
    made_by_auto,
    reopen_run,
    run_config,
    write_config,
    write_memory,
)
from halfstep.trainer.run.metrics import SINKS, MetricsSink
from halfstep.trainer.run.resume import resume
from halfstep.trainer.session import Session

Say = Callable[[str], None]
CURVES = "curves.png"
_LEAST_STEPS = 20
"""Steps of a run of which curves are drawn; fewer show nothing."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        last: The last step's tick; None where there was nothing left to do.
        written: Message about the files that the run leaves to its user; empty if there are none,
            and on ranks other than 0.
        verdict: How the run went, in a line: healthy, or what was wrong; likewise.
    """

    last: Tick | None
    written: str
    verdict: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run early, with a checkpoint."""
        return self.last is not None and self.last.stopped_by.startswith("SIG")


def execute(
    session: Session,
    path: Path,
    say: Say,
    ticked: Callable[[Tick], None],
    *,
    resuming: bool = False,
    sinks: Sequence[MetricsSink] = (),
) -> RunOutcome:
    """Train a session to its end in its run folder; all ranks call it.

    Args:
        session: A new session, which is restored here if ``resuming``.
        path: The run folder: a fresh one, or that of the run to resume.
        say: Prints a line for the user.
        ticked: Called after each step, on every rank.
        resuming: Go on from the folder's newest checkpoint.
        sinks: Loggers of rank 0's records besides those that the configuration names; closed here.

    Raises:
        HalfstepError: As :func:`halfstep.trainer.loop.train`. After a NonFiniteError the best state
            is written all the same, where the task keeps it, and the message says where.
    """
    world = session.world
    _introduce(session, say)
    opened = reopen_run if resuming else partial(create_run, session=session)
    folder = world.main_only(lambda: opened(path))
    every = [*sinks] if world.is_main else []
    last, written, judged = None, "", ""
    try:
        if resuming:
            _go_on(session, path, say)
        if world.is_main:
            named = session.config.run.report_to
            every += [SINKS[name](path, session.step + 1) for name in named]
        for tick in train(session, path):
            for sink in every:
                sink.write(tick.record)
            ticked(tick)
            last = tick
        outcome = RunOutcome(last, "")
        if not outcome.interrupted:
            written = world.main_only(lambda: finish_run(session, path)) or ""
        judged = world.main_only(lambda: _conclude(path, say)) or ""
    except (NonFiniteError, SpikeError) as error:
        world.main_only(lambda: _conclude(path, say))
        if session.best is None or not session.task.keeps_best:
            raise
        best = world.main_only(lambda: finish_run(session, path))
        text = f"{error}; the best state before it: {best}"
        if isinstance(error, SpikeError):
            raise SpikeError(text, cause=error.cause) from error
        told = NonFiniteError(text, cause=error.cause, parameters=error.parameters)
        told.first_cause = error.first_cause
        raise told from error
    finally:
        session.task.close()
        for sink in every:
            sink.close()
        if folder is not None:
            folder.close()
    return RunOutcome(last, written, judged)


def _conclude(path: Path, say: Say) -> str:
    """Draw the run's curves, and return its verdict; on rank 0, however the run ended."""
    record = read_run(path)
    try:
        if len(record.steps) >= _LEAST_STEPS:
            draw_curves(record, path / CURVES)
    except OSError as error:
        say(f"note: {path / CURVES} cannot be written: {error}")
    return verdict(record)


def _introduce(session: Session, say: Say) -> None:
    """Tell the user what is trained, on which device, in which layout and arithmetic."""
    config, support, size = session.config, session.precision.support, session.world.size
    layout = f", {size} ranks as {session.strategy.layout}" if size > 1 else ""
    say(
        f"{config.name} {config.precision}: {session.task.summary()}, on {session.device}{layout} "
        f"({support.how})"
    )
    notes = []
    if session.auto:
        notes.append(f"precision auto took {config.precision}: {session.auto}")
    notes += session.task.notes
    if config.run.compile and support.status == "simulated":
        notes.append("--compile has no effect: torch compiles nothing around a simulation")
    for note in notes:
        say(f"note: {note}")


def _go_on(session: Session, path: Path, say: Say) -> None:
    """Restore a new session from its run's newest checkpoint, and tell the user."""
    before, now = run_config(path).precision, session.config.precision
    origin = resume(session, path / CHECKPOINTS)
    session.world.main_only(lambda: write_config(path, session.config))
    session.world.main_only(lambda: write_memory(path, session.memory))
    say(f"resumed from {origin or 'the start: no checkpoint had been written'}")
    for other in passed_over(path / CHECKPOINTS):
        say(f"note: {other} has no manifest: it is not a checkpoint; remove it")
    if before != now:
        say(f"the precision changes from {before} to {now}")
    elif (device := made_by_auto(path)) and device != name_of(session.device):
        taken = choose(session.device).policy
        kept = (
            f"the run keeps {now}, which auto took for {device}; a new run would take {taken} "
            f"here, and --precision {taken} changes to it"
        )
        say(f"note: {kept}")
