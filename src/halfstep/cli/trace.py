"""The command ``halfstep trace``."""

from __future__ import annotations

import json
import sys

from halfstep.cli.commands import Trace
from halfstep.cli.one_step import opened
from halfstep.diagnostics.trace.record import trace
from halfstep.errors import PrecisionError
from halfstep.trainer.loop import attempt


def run(arguments: Trace) -> int:
    """Take one step, and print what it ran and where that differs from the policy."""
    with opened(arguments, arguments.precision, "trace") as session:
        with trace(session.task.model, session.precision) as ran:
            attempt(session)
        policy = session.precision.policy
    if arguments.save:
        ran.save(arguments.save)
    if arguments.json:
        print(json.dumps(ran.to_json()))
    else:
        differences = ran.differences()
        told = f"all operations ran as {policy} says"
        if differences:
            told = f"{len(differences)} operations ran otherwise than {policy} says:"
        print("\n".join([ran.table(), "", told, *differences]))
    changes = ran.changes(arguments.check) if arguments.check else []
    if changes:
        print("\n".join(changes), file=sys.stderr)
        raise PrecisionError(
            f"what ran differs from {arguments.check} in {len(changes)} lines, printed above; "
            "where that is meant, write it anew by --save"
        )
    return 0
