"""The commands ``trace`` and ``memory``: look at one training step, of which nothing is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from halfstep.cli.commands import Memory, OneStep, Trace
from halfstep.diagnostics.memory import Memory as Held, MemoryMeter, parts_table
from halfstep.diagnostics.trace import trace
from halfstep.errors import ConfigError
from halfstep.trainer.checkpoint import folders_of
from halfstep.trainer.config.config import config_from_table, config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.loop import attempt
from halfstep.trainer.run import resume, run_config
from halfstep.trainer.session import Session, open_session


def run(arguments: Trace | Memory) -> int:
    """Take a step, and print what it ran or what it held."""
    return _trace(arguments) if isinstance(arguments, Trace) else _memory(arguments)


def _trace(arguments: Trace) -> int:
    with _opened(arguments, arguments.precision) as session:
        with trace(session.task.model, session.precision) as ran:
            attempt(session)
        policy = session.precision.policy
    differences = ran.differences()
    verdict = f"all operations ran as {policy} says"
    if differences:
        verdict = f"{len(differences)} operations ran otherwise than {policy} says:"
    print("\n".join([str(ran), "", verdict, *differences]))
    return 0


def _memory(arguments: Memory) -> int:
    found = [_measured(arguments, policy) for policy in arguments.precision or ("fp32", "")]
    print(parts_table([*{each.policy: each for each in found}.values()]))
    return 0


def _measured(arguments: Memory, policy: str) -> Held:
    with _opened(arguments, policy) as session:
        first = session.micro_batches(session.step).batches[0]
        with MemoryMeter(session.precision, first) as meter:
            attempt(session)
    gc.collect()  # what one policy held, before the next is measured
    measured: Held = meter.memory
    return measured


@contextmanager
def _opened(arguments: OneStep, precision: str) -> Iterator[Session]:
    """Open a session that is about to take the step, under a policy or, if empty, its own."""
    config = _config(arguments, precision)
    session = open_session(config)
    try:
        resume(session, folders_of(config.run, Path(arguments.run)))
        yield session
    finally:
        session.task.close()
        session.precision.close()


def _config(arguments: OneStep, precision: str) -> BaseConfig:
    given = config_to_table(run_config(Path(arguments.run)))
    given["precision"] = precision or given["precision"]
    given["run"]["device"] = arguments.device or given["run"]["device"]
    config = config_from_table(given)
    if not config.COMMAND:
        raise ConfigError(
            f"{arguments.run}: this run's model is your program's; use halfstep.trace or "
            "halfstep.MemoryMeter there"
        )
    # the step of one process, whatever layout the run had, and of operations that can be seen
    return replace(config, run=replace(config.run, parallel="", compile="no"))
