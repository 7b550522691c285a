"""The training loop: a generator that yields what each step did."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.diagnostics.group_report import LOUD, GroupReport
from halfstep.diagnostics.lost_updates import LostUpdateMeter
from halfstep.errors import ConfigError, NonFiniteError
from halfstep.precision.result import StepResult
from halfstep.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from halfstep.training.config import TrainConfig
from halfstep.training.environment import gemm_flops_per_second
from halfstep.training.evaluate import Evaluation
from halfstep.training.interrupt import Interrupt
from halfstep.training.metrics import MetricsFile, Record, peak_memory_bytes
from halfstep.training.run_folder import RunFolder
from halfstep.training.schedule import learning_rate
from halfstep.training.session import Session
from halfstep.training.step import train_step

# What a resumed run may change: how long it goes on (which stretches the cosine), what it reports,
# and where prepared data is kept.
RESUMABLE = frozenset(
    {"data.cache_dir", "on_nonfinite", "max_steps", "max_seconds", "eval_every", "eval_batches",
     "lost_update_every", "save_every", "keep", "output_dir", "report_to"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tick:
    """What the loop yields after each step.

    Attributes:
        record: The line that went into ``metrics.jsonl``.
        evaluation: The validation result, if the step ended with one.
        checkpoint: The checkpoint written after the step, if any.
        seconds_left: Estimated seconds to the end of the run, evaluations included.
        stopped_by: Empty, or why this is the last step: a signal's name or ``"max_seconds"``.
        verdicts: Of the lost-update meter on groups that lose much, once a group and process.
    """

    record: Record
    evaluation: Evaluation | None
    checkpoint: Path | None
    seconds_left: float
    stopped_by: str
    verdicts: tuple[str, ...] = ()


def resume(session: Session, folder: RunFolder) -> Path | None:
    """Bring a session to its run's newest checkpoint; None if there is none yet.

    Raises:
        CheckpointError: If the newest checkpoint is damaged or of another run.
    """
    found = list_checkpoints(folder.checkpoints)
    if not found:
        return None
    session.restore(load_checkpoint(found[-1]), found[-1])
    return found[-1]


def require_resumable(
    saved: TrainConfig, wanted: TrainConfig, *, other_precision: bool = False
) -> None:
    """Refuse to resume with a configuration that computes something else.

    Args:
        saved: Of the run.
        wanted: To go on with.
        other_precision: Another precision was asked for by name; a checkpoint's exact masters
            allow it.

    Raises:
        ConfigError: Naming every key that differs and may not.
    """
    a, b = _flat(saved), _flat(wanted)
    allowed = RESUMABLE | ({"precision"} if other_precision else set())
    changed = [key for key in a if a[key] != b[key] and key not in allowed]
    if changed:
        listed = ", ".join(f"{key}={b[key]!r} (the run has {a[key]!r})" for key in changed)
        raise ConfigError(f"--resume cannot change {listed}; start a new run for that")


def train(session: Session, folder: RunFolder) -> Iterator[Tick]:
    """Train to the end of the run, or until a signal or the time limit; yield after every step.

    Metrics are written before each yield, checkpoints every ``save_every`` steps and at the end.

    Raises:
        NonFiniteError: When a numerics guard stops the run; the last checkpoint is intact.
        CheckpointError: When metrics or a checkpoint cannot be written.
    """
    config, settings = session.config, session.config.run
    pace = _Pace(session)
    max_norm = config.optimizer.max_norm or None
    metrics = MetricsFile(folder.metrics, keep_until_step=session.step)
    started = time.perf_counter()
    try:
        with Interrupt() as interrupt, closing(_Losses(session)) as losses:
            while session.step < settings.max_steps:
                begin = time.perf_counter()
                lr = learning_rate(
                    config.optimizer.learning_rate,
                    config.schedule,
                    session.step,
                    session.applied,
                    settings.max_steps,
                )
                batches = session.micro_batches()
                try:
                    result = train_step(
                        session.loss_sum,
                        session.precision,
                        batches,
                        learning_rate=lr,
                        max_norm=max_norm,
                    )
                except NonFiniteError as error:
                    metrics.write(
                        Record(step=session.step + 1, applied=False, skip_reason=error.cause)
                    )
                    raise _stopped(error, session.step + 1, folder) from error
                session.step += 1
                session.tokens += settings.batch_size * config.block_size
                seconds = time.perf_counter() - begin

                stopped_by = interrupt.requested
                if settings.max_seconds and time.perf_counter() - started > settings.max_seconds:
                    stopped_by = stopped_by or "max_seconds"
                finished = session.step == settings.max_steps
                last = finished or bool(stopped_by)
                evaluation = None
                if (
                    _due(session.step, settings.eval_every)
                    or finished
                    or (last and not interrupt.requested)
                ):
                    begin = time.perf_counter()
                    evaluation = session.evaluate()
                    pace.evaluated(time.perf_counter() - begin)
                lost = losses.measured() if result.applied else ()
                record = _record(session, result, lr, seconds, pace, evaluation, lost)
                metrics.write(record)  # before the checkpoint, so that no resume misses the line
                checkpoint = None
                if _due(session.step, settings.save_every) or last:
                    checkpoint = save_checkpoint(
                        folder.checkpoints, session.step, session.checkpoint(), settings.keep
                    )
                pace.stepped(seconds)
                left, verdicts = pace.seconds_left(), losses.verdicts(lost)
                yield Tick(record, evaluation, checkpoint, left, stopped_by, verdicts)
                if last:
                    return
    finally:
        metrics.close()


class _Losses:
    """The lost-update meter, and which of its verdicts have been told."""

    def __init__(self, session: Session) -> None:
        run = session.config.run
        self._meter = LostUpdateMeter(
            session.precision, every=run.lost_update_every, seed=run.seed, start=session.applied
        )
        self._told: set[str] = set()

    def measured(self) -> Sequence[GroupReport]:
        """The reports of the step just applied; none if it was not measured."""
        return self._meter.report() if self._meter.fresh else ()

    def verdicts(self, reports: Sequence[GroupReport]) -> tuple[str, ...]:
        """Of groups that lose much, each group's once."""
        loud = [r for r in reports if r.lost > LOUD and r.group not in self._told]
        self._told |= {report.group for report in loud}
        return tuple(f"{report.group}: {report.verdict}" for report in loud)

    def close(self) -> None:
        """Unhook."""
        self._meter.close()


class _Pace:
    """How fast the run goes: for the metrics' rates and for the time left."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.flops_per_step = (
            session.model.flops_per_token(session.config.block_size)
            * session.config.run.batch_size
            * session.config.block_size
        )
        self.gemm = gemm_flops_per_second(session.precision.policy, session.device)
        self._steps: list[float] = []
        self._evaluations: list[float] = []

    def stepped(self, seconds: float) -> None:
        self._steps = [*self._steps[-19:], seconds]

    def evaluated(self, seconds: float) -> None:
        self._evaluations = [*self._evaluations[-4:], seconds]

    def seconds_left(self) -> float:
        """Steps left at the recent median, and evaluations left."""
        run, step = self._session.config.run, self._session.step
        per_step = sorted(self._steps)[len(self._steps) // 2]
        steps = run.max_steps - step
        every = run.eval_every or run.max_steps
        evaluations = -(-run.max_steps // every) - step // every
        # Before the first evaluation: a forward is a third of a step's arithmetic.
        per_evaluation = (
            sum(self._evaluations) / len(self._evaluations)
            if self._evaluations
            else per_step / 3 * run.eval_batches
        )
        return steps * per_step + max(evaluations, 0) * per_evaluation


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _record(
    session: Session,
    result: StepResult,
    lr: float,
    seconds: float,
    pace: _Pace,
    evaluation: Evaluation | None,
    lost: Sequence[GroupReport],
) -> Record:
    run = session.config.run
    rate = pace.flops_per_step / seconds
    return Record(
        step=session.step,
        applied=result.applied,
        loss=result.loss,
        val_loss=evaluation.loss if evaluation else None,
        learning_rate=lr,
        grad_norm=result.grad_norm,
        loss_scale=result.loss_scale,
        skip_reason=result.reason,
        lost_updates={r.group: r.lost for r in lost if math.isfinite(r.lost)} or None,
        frozen_below={r.group: r.frozen_below for r in lost if math.isfinite(r.frozen_below)}
        or None,
        calibrating=result.calibrating or None,
        rolled_back=result.rolled_back or None,
        skipped_total=result.skipped_total,
        tokens=session.tokens,
        tokens_per_second=run.batch_size * session.config.block_size / seconds,
        flops_per_second=rate,
        gemm_share=rate / pace.gemm,
        peak_memory_bytes=peak_memory_bytes(session.device),
    )


def _stopped(error: NonFiniteError, step: int, folder: RunFolder) -> NonFiniteError:
    kept = list_checkpoints(folder.checkpoints)
    last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint had been written"
    return NonFiniteError(
        f"step {step}: {error}; {last}", cause=error.cause, parameters=error.parameters
    )


def _flat(config: TrainConfig) -> dict[str, object]:
    """Key to value; the run's own keys without their section, as the table above spells them."""
    values: dict[str, object] = {}
    for name in ("precision", "model", "data", "optimizer", "schedule", "run"):
        part = getattr(config, name)
        if isinstance(part, str):
            values[name] = part
            continue
        prefix = "" if name == "run" else f"{name}."
        for key in type(part).__dataclass_fields__:
            values[prefix + key] = getattr(part, key)
    return values


def with_run_folder(config: TrainConfig, path: Path) -> TrainConfig:
    """The configuration with its run folder filled in."""
    return replace(config, run=replace(config.run, output_dir=str(path)))
