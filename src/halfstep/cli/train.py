"""The commands ``halfstep train`` and ``halfstep finetune``: start or resume a run of any task."""

from __future__ import annotations

from pathlib import Path

from halfstep.cli.commands import Request
from halfstep.cli.console import RunDisplay, megabytes
from halfstep.cli.main import INTERRUPTED
from halfstep.distributed.world import World, open_world
from halfstep.errors import ConfigError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import choose_device, keep_freed_memory
from halfstep.trainer.loop import Tick
from halfstep.trainer.run import (
    default_run_folder,
    execute,
    is_run,
    require_fresh,
    resumed,
    run_config,
    way_on,
    with_run_folder,
)
from halfstep.trainer.session import Session, open_session


def run(request: Request) -> int:
    """Start or resume a run on this process's rank; return 0, or 4 if a signal ended it early."""
    config = _requested(request)
    kind = choose_device(config.run.device).type
    with open_world(kind, timeout_seconds=config.run.rank_timeout) as world:
        device = choose_device(config.run.device, world.local_rank)
        named = config.run.output_dir or str(default_run_folder(config, device))
        path = Path(world.remember("run folder", named))
        resuming = request.start.resume
        # only rank 0 looks, as a shared file system may show a new folder to others later
        held = world.share(str(is_run(path)))
        foreign = world.remember("held a run before", held) == "True"
        if world.attempt > 0 and held == "True" and not resuming and not foreign:
            config, resuming = _resumed(request, path), True  # the launcher restarted this run
        if not resuming:
            world.main_only(lambda: require_fresh(path))
            config = with_run_folder(config, path)
        return _train(request, config, path, world, resuming=resuming)


def _train(
    request: Request, config: BaseConfig, path: Path, world: World, *, resuming: bool
) -> int:
    keep_freed_memory()
    device = choose_device(config.run.device, world.local_rank)
    title = f"{config.name} {parse_policy(config.precision, device)}"
    with RunDisplay(title, quiet=request.start.quiet or not world.is_main) as display:
        session = open_session(config, display.prepared, world=world)
        outcome = execute(
            session,
            path,
            display.say,
            lambda tick: display.stepped(tick, session.config.run.max_steps),
            resuming=resuming,
        )
        if outcome.interrupted:
            display.say(f"saved; {way_on(config)}")
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
        raise ConfigError(f"{path} is a run of the task {saved.TASK}; {way_on(saved)}")
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
    parts.append(f"peak memory {megabytes(record.peak_memory_bytes or 0)}")
    if best is not None and best.step != record.step:
        parts.append(f"the best state has {best.evaluation.text}")
    if last.stopped_by:
        parts.append(f"stopped by {last.stopped_by}")
    return "; ".join(parts)
