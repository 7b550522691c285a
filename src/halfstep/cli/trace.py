"""The command ``halfstep trace``."""

from __future__ import annotations

import json

from halfstep.cli.commands import Trace
from halfstep.cli.one_step import opened
from halfstep.diagnostics.trace.record import trace
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
        verdict = f"all operations ran as {policy} says"
        if differences:
            verdict = f"{len(differences)} operations ran otherwise than {policy} says:"
        print("\n".join([ran.table(), "", verdict, *differences]))
    return 0
