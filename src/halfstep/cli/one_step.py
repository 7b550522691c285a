"""Opens a session for commands that look at one training step, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from halfstep.cli.commands import OneStep
from halfstep.cli.console import RunDisplay
from halfstep.errors import ConfigError
from halfstep.trainer.config.config import config_from_table, config_to_table, load_config
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.run.folder import CHECKPOINTS, resume, run_config
from halfstep.trainer.session import Session, open_session


@contextmanager
def opened(arguments: OneStep, precision: str, name: str) -> Iterator[Session]:
    """A session that is about to take the step.

    Args:
        arguments: What the step is one of.
        precision: The policy; empty: that of the run or configuration.
        name: Of the command, for the progress of preparing data.
    """
    config = _config(arguments, precision)
    with RunDisplay(name) as display:
        session = open_session(config, display.prepared)
    try:
        if arguments.run:
            resume(session, Path(arguments.run) / CHECKPOINTS)
        yield session
    finally:
        session.task.close()
        session.precision.close()


def _config(arguments: OneStep, precision: str) -> BaseConfig:
    """Load the configuration of a run or of a new one, with the changes that were asked for."""
    changes: dict[str, object] = {}
    if precision:
        changes["precision"] = precision
    if arguments.device:
        changes["run.device"] = arguments.device
    if arguments.data:
        changes["data.train"] = list(arguments.data)
    if arguments.config:
        config = load_config(arguments.config, [*changes.items()])
    else:
        table = config_to_table(run_config(Path(arguments.run)))
        table["precision"] = changes.pop("precision", table["precision"])
        for key, value in changes.items():
            table[key.split(".")[0]][key.split(".")[1]] = value
        config = config_from_table(table)
    if not config.COMMAND:
        raise ConfigError(
            f"{arguments.run}: this run's model is your program's; look at a step there, with "
            "halfstep.trace or halfstep.MemoryMeter around it"
        )
    # the step of one process, whatever layout the run had
    return replace(config, run=replace(config.run, parallel=""))
