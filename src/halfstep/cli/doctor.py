"""The command ``halfstep doctor``: which precision suits a machine, and what the machine is."""

from __future__ import annotations

import json
from typing import Any

from halfstep.cli.commands import Doctor
from halfstep.shown import aligned
from halfstep.trainer.environment import (
    choose_device,
    diagnose,
    diagnose_named,
    environment,
    is_live,
)


def run(arguments: Doctor) -> int:
    """Print which policy each device is good for; of this machine also what is installed."""
    every = [
        diagnose(choose_device(name)) if is_live(name) else diagnose_named(name)
        for name in arguments.device
    ]
    if len(every) > 1:
        if arguments.json:
            print(json.dumps(every, indent=1))
            return 0
        rows = [
            (name, d["policy"], d["reason"])
            for name, d in zip(arguments.device, every, strict=True)
        ]
        print(aligned([("device", "take", "why"), *rows]))
        return 0
    (name,), (found,) = arguments.device, every
    here = environment(choose_device(name)) if is_live(name) else None
    if arguments.json:
        print(json.dumps(found | ({"environment": here} if here else {}), indent=1))
        return 0
    print(_text(found))
    if here:
        print(f"\n{_machine(here)}")
    return 0


def _text(found: dict[str, Any]) -> str:
    """Format a diagnosis: what to take and why, and the formats."""
    rows = [("format", "hardware", "halfstep", "GFLOP/s")]
    for row in found["forms"]:
        rate = row["flops_per_second"]
        shown = "-" if rate is None else f"{rate / 1e9:,.0f}"
        rows.append((row["form"], row["status"], row["here"] or "-", shown))
    lines = [f"take {found['policy']}: {found['reason']}", f"source: {found['source']}"]
    lines += ["", aligned(rows, {3})]
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])])


def _machine(report: dict[str, Any]) -> str:
    """Format an :func:`environment`: software and hardware, and how each policy runs here."""
    policies = [(name, row["status"], row["reason"]) for name, row in report["precisions"].items()]
    machine = [(key, _plain(value)) for key, value in report.items() if key != "precisions"]
    return f"{aligned(machine)}\n\n{aligned([('precision', 'here', 'reason'), *policies])}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return "; ".join(map(_plain, value)) or "none" if isinstance(value, list) else str(value)
