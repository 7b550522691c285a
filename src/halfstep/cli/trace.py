"""The command ``halfstep trace``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from halfstep.cli.commands import Trace
from halfstep.cli.console import RunDisplay
from halfstep.diagnostics.trace.record import trace
from halfstep.errors import ConfigError, PrecisionError
from halfstep.trainer.config.config import config_from_table, config_to_table, load_config
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.run.folder import CHECKPOINTS, run_config
from halfstep.trainer.run.resume import resume
from halfstep.trainer.session import open_session
from halfstep.trainer.step import train_step


def run(arguments: Trace) -> int:
    """Take one step, and print what it ran and where that differs from the policy."""
    config = _config(arguments)
    with RunDisplay("trace") as display:
        session = open_session(config, display.prepared, resuming=bool(arguments.run))
    if arguments.run:
        resume(session, Path(arguments.run) / CHECKPOINTS)
    batches, seeds = session.micro_batches()
    rate = partial(session.task.learning_rate, taken=session.step, applied=session.applied)
    with trace(session.task.model, session.precision) as ran:
        train_step(
            session.loss_sum,
            session.precision,
            session.strategy,
            batches,
            learning_rate=rate,
            max_norm=config.optimizer.max_norm or None,
            targets=session.task.targets,
            seeds=seeds,
        )
    session.task.close()
    differences = ran.differences()
    if arguments.save:
        ran.save(arguments.save)
    if arguments.json:
        print(json.dumps({**ran.to_json(), "differences": differences}))
    else:
        told = f"all operations ran as {config.precision} says"
        if differences:
            told = f"{len(differences)} operations ran otherwise than {config.precision} says:"
        print("\n".join([ran.table(), "", told, *differences]))
    changes = ran.changes(arguments.check) if arguments.check else []
    if changes:
        print("\n".join(changes), file=sys.stderr)
        raise PrecisionError(
            f"what ran differs from {arguments.check} in {len(changes)} lines, printed above; "
            "where that is meant, write it anew by --save"
        )
    return 0


def _config(arguments: Trace) -> BaseConfig:
    """Load the configuration of a run or of a new one, with the changes that were asked for."""
    changes: dict[str, object] = {}
    if arguments.precision:
        changes["precision"] = arguments.precision
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
            f"{arguments.run}: this run's model is your program's; put halfstep.trace(model, "
            "trainer.session.precision) around a step there"
        )
    # the step of one process, whatever layout the run had
    return replace(config, run=replace(config.run, parallel=""))
