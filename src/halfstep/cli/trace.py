"""The command ``halfstep trace``."""

from __future__ import annotations

import json

from halfstep.cli.commands import Trace
from halfstep.cli.one_step import opened
from halfstep.cli.words import told
from halfstep.diagnostics.trace.record import trace
from halfstep.trainer.loop import attempt
from halfstep.words import said


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
        verdict = told("all_as_said", policy=policy)
        if differences:
            verdict = told("otherwise", count=len(differences), policy=policy)
        print("\n".join([ran.table(), "", verdict, *map(said, differences)]))
    return 0
