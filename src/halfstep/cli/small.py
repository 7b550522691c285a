"""The commands ``explain``, ``doctor``, ``report``, ``trace`` and ``memory``."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from halfstep.cli.commands import Doctor, Explain, Memory, OneStep, Report, Trace
from halfstep.diagnostics.memory import Memory as Held, MemoryMeter, parts_table
from halfstep.diagnostics.records.compare import compare
from halfstep.diagnostics.trace import trace
from halfstep.errors import ConfigError
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import POLICIES, RECIPES
from halfstep.report.page import make_report
from halfstep.report.record import read_run
from halfstep.shown import aligned
from halfstep.trainer.checkpoint import folders_of
from halfstep.trainer.config.config import config_from_table, config_to_table
from halfstep.trainer.environment import choose_device, environment
from halfstep.trainer.loop import attempt
from halfstep.trainer.run import resume, run_config
from halfstep.trainer.session import Session, open_session


def run(arguments: Explain | Doctor | Report | Trace | Memory) -> int:
    """Run one of these commands."""
    match arguments:
        case Explain():
            _explain(arguments)
        case Doctor():
            _doctor(arguments)
        case Report():
            _report(arguments)
        case Trace():
            _trace(arguments)
        case Memory():
            _memory(arguments)
    return 0


def _explain(arguments: Explain) -> None:
    device = choose_device(arguments.device)
    if arguments.policies:
        print("\n\n".join(str(explain(text, device)) for text in arguments.policies))
        return
    rows = [("policy", "bytes/param with AdamW", "scale", f"on {device}")]
    for name, policy in {**POLICIES, **RECIPES}.items():
        size = f"{sum(bytes_per_parameter(policy).values()):g}"
        found = support(policy, device)
        rows.append((name, size, policy.loss_scale.kind, f"{found.status}: {found.reason}"))
    taken = choose(device)
    print(f"{aligned(rows, {1})}\n\nauto is {taken.policy} here: {taken.reason}.")


# --- doctor ---------------------------------------------------------------------------------------


def _doctor(arguments: Doctor) -> None:
    device = choose_device(arguments.device)
    chosen = choose(device)
    if not chosen.source:
        raise ConfigError(f"{chosen.reason}; halfstep doctor --device cpu")
    found = {"policy": chosen.policy, "reason": chosen.reason, "source": chosen.source}
    if arguments.json:
        print(json.dumps({**found, "environment": environment(device)}, indent=1))
    else:
        print(f"take {found.pop('policy')}: {found.pop('reason')}")
        print("\n".join(f"{key}: {text}" for key, text in found.items()))


# --- report ---------------------------------------------------------------------------------------


def _report(arguments: Report) -> None:
    if not arguments.runs:
        raise ConfigError("halfstep report RUN [RUN ...]: give the folder of a run, or of several")
    folders = [Path(name) for name in arguments.runs]
    report = make_report([read_run(folder) for folder in folders], arguments.lang)
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    path = report.write(Path(arguments.out) if arguments.out else default)
    for row in report.rows:
        print(f"{row.record.name}: {row.verdict}")
    if len(report.rows) > 1:
        heads = [*dict.fromkeys(head for row in report.rows for head in row.card)]
        rows = [[row.card.get(head, "-") for head in heads] for row in report.rows]
        print("", aligned([heads, *rows]), "", sep="\n")
    if len(folders) == 2 and all((each / "record" / "record.json").is_file() for each in folders):
        print(compare(*folders))
    print(f"Written: {path}")


# --- one training step, of which nothing is kept -------------------------------------------------


def _trace(arguments: Trace) -> None:
    with _opened(arguments, arguments.precision) as session:
        with trace(session.task.model, session.precision) as ran:
            attempt(session)
        policy = session.precision.policy
    differences = ran.differences()
    verdict = f"all operations ran as {policy} says"
    if differences:
        verdict = f"{len(differences)} operations ran otherwise than {policy} says:"
    print("\n".join([str(ran), "", verdict, *differences]))


def _memory(arguments: Memory) -> None:
    found = [_measured(arguments, policy) for policy in arguments.precision or ("fp32", "")]
    print(parts_table([*{each.policy: each for each in found}.values()]))


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
    config = replace(config, run=replace(config.run, parallel="", compile="no"))
    session = open_session(config)
    try:
        resume(session, folders_of(config.run, Path(arguments.run)))
        yield session
    finally:
        session.task.close()
        session.precision.close()
