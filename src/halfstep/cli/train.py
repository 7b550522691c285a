"""``halfstep train``."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.cli.console import RunDisplay, megabytes, write_out
from halfstep.cli.outcome import INTERRUPTED
from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World, open_world
from halfstep.errors import ConfigError, NonFiniteError
from halfstep.trainer.config.config import TrainConfig, load_config
from halfstep.trainer.config.finetune import ClassifyConfig, FinetuneConfig, LMConfig
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import choose_device, keep_freed_memory
from halfstep.trainer.loop import Tick, train
from halfstep.trainer.run.folder import (
    CHECKPOINTS,
    create_run,
    default_run_folder,
    finish_run,
    is_run,
    reopen_run,
    require_fresh,
    run_config,
    write_config,
)
from halfstep.trainer.run.metrics import MetricsSink, NoSink, open_sink, require_sink
from halfstep.trainer.run.resume import passed_over, require_resumable, resume, with_run_folder
from halfstep.trainer.session import Session, open_session


def run(arguments: argparse.Namespace) -> int:
    """Train, new or resumed, on this process's rank; returns 0, or 4 if a signal ended it early.

    ``arguments.task`` and ``arguments.config`` name the task and its configuration.
    """
    overrides = given_keys(arguments)
    config = _requested(arguments, overrides)
    kind = choose_device(config.run.device).type
    with open_world(kind, timeout_seconds=config.run.rank_timeout) as world:
        named = config.run.output_dir or str(default_run_folder(config))
        path = Path(world.remember("run folder", named))
        resuming: bool = arguments.resume
        # by rank 0's eyes: file systems may show a new folder to others later
        held = world.share(str(is_run(path)))
        foreign = world.remember("held a run before", held) == "True"
        if world.attempt > 0 and held == "True" and not resuming and not foreign:
            config, resuming = _resumed(arguments, overrides, path), True  # started anew
        if not resuming:
            world.main_only(lambda: require_fresh(path))
            config = with_run_folder(config, path)
        elif "run.parallel" not in dict(overrides):
            config = _fitting(config, world.size)
        return _train(arguments, config, path, world, resuming=resuming)


def _train(
    arguments: argparse.Namespace, config: BaseConfig, path: Path, world: World, *, resuming: bool
) -> int:
    require_sink(config.run.report_to)
    keep_freed_memory()
    title = f"{config.name} {config.precision}"
    with RunDisplay(title, quiet=arguments.quiet or not world.is_main) as display:
        session = open_session(config, display.prepared, resuming=resuming, world=world)
        support = session.precision.support
        layout = f", {world.size} ranks as {session.strategy.layout}" if world.size > 1 else ""
        display.say(
            f"{title}: {session.task.summary()}, on {session.device}{layout} "
            f"({support.status}: {support.reason})"
        )
        notes = [*_warmup_note(arguments, config, resuming), *session.task.notes]
        if config.run.compile and support.status == "simulated":
            notes.append("--compile has no effect: torch compiles nothing around a simulation")
        for note in notes:
            display.say(f"note: {note}")
        opened = reopen_run if resuming else partial(create_run, session=session)
        folder = world.main_only(lambda: opened(path))
        last = None
        sink: MetricsSink = NoSink()
        try:
            if resuming:
                _go_on(session, path, display)
            if world.is_main:
                sink = open_sink(config.run.report_to, path, session.step + 1)
            for tick in train(session, path):
                display.stepped(tick, session.config.run.max_steps)
                sink.write(tick.record)
                last = tick
            interrupted = last is not None and last.stopped_by.startswith("SIG")
            if interrupted:
                display.say(f"saved: go on by the same command with --resume --output-dir {path}")
            left = "" if interrupted else world.main_only(lambda: finish_run(session, path))
        except NonFiniteError as error:
            if session.best is None or not session.task.keeps_best:
                raise
            best = world.main_only(lambda: finish_run(session, path))
            message = f"{error}; the best state before it: {best}"
            raise NonFiniteError(message, cause=error.cause, parameters=error.parameters) from error
        finally:
            sink.close()
            if folder is not None:
                folder.close()
    if world.is_main:
        write_out(_summary(session, path, last))
        if left:
            write_out(left)
    return INTERRUPTED if interrupted else 0


def _go_on(session: Session, path: Path, display: RunDisplay) -> None:
    """Bring a new session to where its run was left, and say so."""
    before, now = run_config(path).precision, session.config.precision
    origin = resume(session, path / CHECKPOINTS)
    session.world.main_only(lambda: write_config(path, session.config))
    display.say(f"resumed from {origin or 'the start: no checkpoint had been written'}")
    for other in passed_over(path / CHECKPOINTS):
        display.say(f"note: {other} has no manifest: it is not a checkpoint; remove it")
    if before != now:
        display.say(f"the precision changes from {before} to {now}")


def _warmup_note(arguments: argparse.Namespace, config: BaseConfig, resuming: bool) -> list[str]:
    """That the warm-up is shorter than its configuration says, where it is."""
    if resuming or "schedule.warmup_steps" in dict(given_keys(arguments)):
        return []
    kept = load_config(arguments.config or arguments.default_config).schedule.warmup_steps
    used = config.schedule.warmup_steps
    return [f"the warm-up is {used} steps instead of {kept}: as long as the run"] * (used < kept)


def _fitting(config: BaseConfig, ranks: int) -> BaseConfig:
    """The run's layout, or data over all ranks if it is of another number of ranks than there are.

    Any layout goes on from any other's checkpoint; the first line of a run shows which is used.
    """
    if not config.run.parallel or Layout.parse(config.run.parallel).size == ranks:
        return config
    return dataclasses.replace(config, run=dataclasses.replace(config.run, parallel=""))


def given_keys(arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    """Configuration keys and values of the command line; dotted overrides come last."""
    keys = [key for key in vars(arguments) if "." in key or key == "precision"]
    given = [(key, getattr(arguments, key)) for key in keys]
    dotted: list[tuple[str, Any]] = arguments.overrides
    return [(key, value) for key, value in given if value is not None] + dotted


def _requested(arguments: argparse.Namespace, overrides: list[tuple[str, Any]]) -> BaseConfig:
    """The configuration of a new run or to go on by; refuses before anything is prepared."""
    if not arguments.resume:
        spec = arguments.config or arguments.default_config
        config = load_config(spec, overrides)
        _require_trust(arguments, config)
        if arguments.task != config.TASK:
            raise ConfigError(
                f"configuration {arguments.config} is of the task {config.TASK}: use "
                f"halfstep {'train' if config.TASK == 'pretrain' else f'finetune {config.TASK}'}"
            )
        return config
    named = dict(overrides).get("run.output_dir")
    if named is None:
        raise ConfigError("--resume needs --output-dir, the folder of the run to go on with")
    return _resumed(arguments, overrides, Path(named))


def _resumed(
    arguments: argparse.Namespace, overrides: list[tuple[str, Any]], path: Path
) -> BaseConfig:
    """The configuration to go on by with the run in ``path``."""
    saved = run_config(path)
    if arguments.task != saved.TASK:
        raise ConfigError(
            f"{path} is a run of the task {saved.TASK}: go on with it by halfstep "
            f"{'train' if saved.TASK == 'pretrain' else f'finetune {saved.TASK}'} --resume"
        )
    wanted = load_config(arguments.config or str(path / "config.toml"), overrides)
    if arguments.config is not None:  # the same command line once more
        wanted = _filled(wanted, saved)
    if isinstance(wanted, FinetuneConfig) and "run.epochs" in dict(overrides):
        steps = int(dict(overrides).get("run.max_steps", 0))  # else the run's own would count
        wanted = dataclasses.replace(wanted, run=dataclasses.replace(wanted.run, max_steps=steps))
    _require_trust(arguments, wanted)
    require_resumable(saved, wanted, other_precision="precision" in dict(overrides))
    return with_run_folder(wanted, path)


def _require_trust(arguments: argparse.Namespace, config: BaseConfig) -> None:
    """Believe no file that asks to run a model's code: only the flag on the command line."""
    flag = "model.trust_remote_code"
    asked = isinstance(config, ClassifyConfig | LMConfig) and config.model.trust_remote_code
    if asked and getattr(arguments, flag, None) is not True:
        raise ConfigError(
            f"{flag}=true would run Python code that comes with the model; only "
            "--trust-remote-code on the command line allows that: give it if you have read the code"
        )


def _filled(wanted: BaseConfig, saved: BaseConfig) -> BaseConfig:
    """A configuration with what only the run's first start could know."""
    if isinstance(wanted, TrainConfig) and isinstance(saved, TrainConfig):
        shape = wanted.model
        if wanted.run.init_from and wanted.run.init_from == saved.run.init_from:
            shape = dataclasses.replace(
                saved.model,
                dropout=shape.dropout,
                activation_checkpointing=shape.activation_checkpointing,
            )
        elif not shape.vocab_size:
            shape = dataclasses.replace(shape, vocab_size=saved.model.vocab_size)
        return dataclasses.replace(wanted, model=shape)
    if isinstance(wanted, ClassifyConfig | LMConfig) and isinstance(saved, type(wanted)):
        warmup = wanted.schedule.warmup_steps or saved.schedule.warmup_steps
        schedule = dataclasses.replace(wanted.schedule, warmup_steps=warmup)
        model: Any = wanted.model
        if not model.revision:
            model = dataclasses.replace(model, revision=saved.model.revision)
        return dataclasses.replace(wanted, schedule=schedule, model=model)
    return wanted


def _summary(session: Session, path: Path, last: Tick | None) -> str:
    if last is None:
        return f"{path}: step {session.step} of {session.config.run.max_steps}: nothing to do"
    record = last.record
    parts = [f"{path}: step {record.step}"]
    if last.evaluation is not None:
        parts.append(last.evaluation.text)
    best = session.best if session.task.keeps_best else None
    if best is not None:
        parts.append(f"best at step {best.step}")
    parts.append(f"{session.applied} steps applied, {record.skipped_total} skipped")
    parts.append(f"peak memory {megabytes(record.peak_memory_bytes or 0)}")
    if record.sent_bytes:
        parts.append(
            f"each rank sent {megabytes(record.sent_bytes)} of gradients and parameters a step "
            f"(in fp32 {megabytes(record.sent_bytes_fp32 or 0)})"
        )
    if best is not None and best.step != record.step:
        parts.append(f"the best state has {best.evaluation.text}")
    if last.stopped_by:
        parts.append(f"stopped by {last.stopped_by}")
    return "; ".join(parts)
