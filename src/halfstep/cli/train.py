"""The commands ``halfstep train`` and ``halfstep finetune``: start or resume a run of any task.

The progress is on stderr: a line that a terminal rewrites, elsewhere a few lines.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from halfstep.cli.commands import Request
from halfstep.cli.main import INTERRUPTED
from halfstep.distributed.layout import Layout
from halfstep.distributed.world import open_world
from halfstep.errors import ConfigError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import choose_device, keep_freed_memory
from halfstep.trainer.loop import Tick, way_on
from halfstep.trainer.run import (
    begin,
    default_run_folder,
    execute,
    resumed,
    run_config,
    with_run_folder,
)
from halfstep.trainer.session import Session, open_session

_LINE_EVERY = 10.0  # seconds between lines where there is no terminal


def run(request: Request) -> int:
    """Start or resume a run on this process's rank; return 0, or 4 if a signal ended it early."""
    config = _requested(request)
    kind = choose_device(config.run.device).type
    with open_world(kind, timeout_seconds=config.run.rank_timeout) as world:
        device = choose_device(config.run.device, world.local_rank)
        named = config.run.output_dir or str(default_run_folder(config, device))
        path = Path(world.remember("run folder", named))
        resuming = begin(world, path, request.start.resume)
        if not resuming:
            config = with_run_folder(config, path)
        elif not request.start.resume:
            config = _resumed(request, path)  # the launcher has started this run again
        keep_freed_memory(sharded=Layout.of(config.run.parallel).shard > 1)
        title = f"{config.name} {parse_policy(config.precision, device)}"
        with RunDisplay(title, quiet=request.start.quiet or not world.is_main) as display:
            session = open_session(config, world=world)
            outcome = execute(
                session,
                path,
                display.say,
                lambda tick: display.stepped(tick, session.config.run.max_steps),
                resuming=resuming,
            )
        if world.is_main:
            print(_summary(session, path, outcome.last))
            if outcome.verdict:
                said, *command = outcome.verdict.splitlines()
                print(f"{said}; a page about the run: halfstep report {path}", *command, sep="\n")
            if outcome.written:
                print(outcome.written)
        return INTERRUPTED if outcome.interrupted else 0


def _requested(request: Request) -> BaseConfig:
    if request.start.resume:
        named = request.given.get("run.output_dir")
        if named is None:
            raise ConfigError("--resume needs --output-dir, the folder of the run to go on with")
        return _resumed(request, Path(named))
    named = request.start.config or request.kind.shipped(request.given)
    config = load_config(named, list(request.given.items()))
    if type(config) is not request.kind:
        raise ConfigError(
            f"configuration {request.start.config} is of the task {config.TASK}: use "
            f"{f'halfstep {config.COMMAND}' if config.COMMAND else 'halfstep.Trainer'}"
        )
    return config


def _resumed(request: Request, path: Path) -> BaseConfig:
    given, named = dict(request.given), request.start.config
    saved = run_config(path)
    if type(saved) is not request.kind:
        raise ConfigError(f"{path} is a run of the task {saved.TASK}; go on: {way_on(saved)}")
    if "run.epochs" in given:
        given.setdefault("run.max_steps", 0)  # otherwise the saved max_steps would override epochs
    own = str(path / "config.toml")
    wanted = load_config(named or own, list(given.items()), unknown=None if named else {})
    if named:  # the command line of the first start, repeated
        wanted = wanted.filled(saved)
    return resumed(saved, wanted, path, other_precision="precision" in given)


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
    parts.append(f"peak memory {(record.peak_memory_bytes or 0) / 1e6:,.0f} MB")
    if best is not None and best.step != record.step:
        parts.append(f"the best state has {best.evaluation.text}")
    if last.stopped_by:
        parts.append(f"stopped by {last.stopped_by}")
    return "; ".join(parts)


# What is shown of it.


class RunDisplay:
    """Shows the training on stderr; a context manager."""

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
