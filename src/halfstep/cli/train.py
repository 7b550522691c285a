"""``halfstep train``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from halfstep.cli.arguments import TRAIN_OPTIONS
from halfstep.cli.console import RunDisplay, megabytes, write_out
from halfstep.errors import ConfigError
from halfstep.training.allocator import keep_freed_memory
from halfstep.training.config import TrainConfig, load_config
from halfstep.training.loop import Tick, require_resumable, resume, train, with_run_folder
from halfstep.training.run_folder import (
    create_run,
    default_run_folder,
    reopen_run,
    require_fresh,
    run_config,
    write_config,
)
from halfstep.training.session import Session, open_session
from halfstep.training.tensorboard import MetricsSink, NoSink, open_sink, require_sink

DEFAULT_CONFIG = "gpt-small-cpu"
INTERRUPTED = 4


def run(arguments: argparse.Namespace) -> int:
    """Train, new or resumed; returns 0, or 4 if a signal ended the run early."""
    overrides = _overrides(arguments)
    path, config = _resolve(arguments, overrides)
    require_sink(config.run.report_to)
    keep_freed_memory()
    title = f"{config.name} {config.precision}"
    with RunDisplay(title, quiet=arguments.quiet) as display:
        session = open_session(config, display.prepared, resuming=arguments.resume)
        support = session.precision.support
        display.say(
            f"{title}: {session.model.num_parameters():,} parameters, "
            f"{session.data.train.count:,} training tokens, on {session.device} "
            f"({support.status}: {support.reason})"
        )
        if arguments.resume:
            folder = reopen_run(path)
            before = run_config(path).precision
            origin = resume(session, folder)
            write_config(path, session.config)
            display.say(f"resumed from {origin or 'the start: no checkpoint had been written'}")
            if before != config.precision:
                display.say(f"the precision changes from {before} to {config.precision}")
        else:
            folder = create_run(path, session)
        last = None
        sink: MetricsSink = NoSink()
        try:
            sink = open_sink(config.run.report_to, path, session.step + 1)
            for tick in train(session, folder):
                display.stepped(tick, config.run.max_steps)
                sink.write(tick.record)
                last = tick
        finally:
            sink.close()
            folder.close()
    return _summary(session, path, last)


def _overrides(arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    keys = [key for _, key, _, _ in TRAIN_OPTIONS] + ["run.compile"]
    given = [(key, getattr(arguments, key)) for key in keys]
    dotted: list[tuple[str, Any]] = arguments.overrides
    return [(key, value) for key, value in given if value is not None] + dotted


def _resolve(
    arguments: argparse.Namespace, overrides: list[tuple[str, Any]]
) -> tuple[Path, TrainConfig]:
    """The run folder and the configuration; refuses before anything is prepared."""
    if not arguments.resume:
        config = load_config(arguments.config or DEFAULT_CONFIG, overrides)
        path = Path(config.run.output_dir) if config.run.output_dir else default_run_folder(config)
        require_fresh(path)
        return path, with_run_folder(config, path)
    named = dict(overrides).get("run.output_dir")
    if named is None:
        raise ConfigError("--resume needs --output-dir, the folder of the run to go on with")
    path = Path(named)
    saved = run_config(path)
    if arguments.config is None:
        wanted = load_config(str(path / "config.toml"), overrides)
    else:  # the same command line once more: what only the first start could know is filled in
        wanted = load_config(arguments.config, overrides)
        shape = wanted.model
        if wanted.run.init_from and wanted.run.init_from == saved.run.init_from:
            shape = dataclasses.replace(
                saved.model,
                dropout=shape.dropout,
                activation_checkpointing=shape.activation_checkpointing,
            )
        elif not shape.vocab_size:
            shape = dataclasses.replace(shape, vocab_size=saved.model.vocab_size)
        wanted = dataclasses.replace(wanted, model=shape)
    require_resumable(saved, wanted, other_precision="precision" in dict(overrides))
    return path, wanted


def _summary(session: Session, path: Path, last: Tick | None) -> int:
    if last is None:
        write_out(f"{path}: step {session.step} of {session.config.run.max_steps}: nothing to do")
        return 0
    record = last.record
    parts = [f"{path}: step {record.step}"]
    if last.evaluation is not None:
        parts.append(f"validation loss {last.evaluation.loss:.4f} nats per token")
        if last.evaluation.bits_per_byte is not None:
            parts.append(f"{last.evaluation.bits_per_byte:.4f} bits per byte")
    parts.append(f"{session.applied} steps applied, {record.skipped_total} skipped")
    parts.append(f"peak memory {megabytes(record.peak_memory_bytes or 0)}")
    if last.stopped_by:
        parts.append(f"stopped by {last.stopped_by}")
    write_out("; ".join(parts))
    return INTERRUPTED if last.stopped_by.startswith("SIG") else 0
