"""The commands ``explain``, ``doctor`` and ``report``."""

from __future__ import annotations

import json
from pathlib import Path

from halfstep.cli.commands import Doctor, Explain, Report
from halfstep.diagnostics.runs.compare import compare
from halfstep.errors import ConfigError
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import POLICIES, RECIPES
from halfstep.report.page import make_report
from halfstep.report.record import read_run
from halfstep.shown import aligned
from halfstep.trainer.environment import choose_device, environment


def run(arguments: Explain | Doctor | Report) -> int:
    """Run one of these commands."""
    match arguments:
        case Explain():
            _explain(arguments)
        case Doctor():
            _doctor(arguments)
        case Report():
            _report(arguments)
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
