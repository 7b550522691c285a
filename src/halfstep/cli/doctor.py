"""The command ``halfstep doctor``: the precision for a machine; mistakes in scripts and runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from halfstep.cli.commands import Doctor
from halfstep.cli.formats import table
from halfstep.cli.words import told
from halfstep.diagnostics.scripts.rules import Finding, check_script
from halfstep.errors import ConfigError
from halfstep.precision.policy.devices import status_text
from halfstep.trainer.config.config import load_config
from halfstep.trainer.doctor.machine import (
    Diagnosis,
    diagnose,
    diagnose_named,
    is_live,
    live_device,
    products_of,
    read_product,
)
from halfstep.trainer.doctor.runs import check_run
from halfstep.words import said

WRONG = 3
"""The exit code where a script or a run has a mistake."""


def run(arguments: Doctor) -> int:
    """Print which policy a device is good for, or what is wrong with scripts and runs."""
    if arguments.targets:
        return _check(arguments)
    products = [read_product(text) for text in arguments.shapes]
    if arguments.config:
        products += products_of(load_config(arguments.config))
    every = [
        diagnose(live_device(name), tuple(products)) if is_live(name) else diagnose_named(name)
        for name in arguments.device
    ]
    if arguments.json:
        values = [found.to_json() for found in every]
        print(json.dumps(values if len(values) > 1 else values[0], indent=1))
    elif len(every) == 1:
        print(text_of(every[0]))
    else:
        rows = [
            (name, d.policy, said(d.reason))
            for name, d in zip(arguments.device, every, strict=True)
        ]
        print(table([(told("device"), told("take"), told("why")), *rows], set()))
    return 0


def _check(arguments: Doctor) -> int:
    """Look for mistakes in every target; return 3 if there is one."""
    given = [n for n in ("shapes", "config") if getattr(arguments, n)]
    if given or arguments.device != ("auto",):
        raise ConfigError(
            "halfstep doctor TARGET looks at files; --device, --shapes and --config are for the "
            "machine: leave out one or the other"
        )
    every = [finding for target in arguments.targets for finding in _findings(Path(target))]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in every], indent=1))
        return WRONG if every else 0
    for finding in every:
        where = f"{finding.path}:{finding.line}" if finding.line else finding.path
        print(f"{where}: {said(finding.what)} [{finding.rule}]")
        print(f"    {said(finding.why)}\n    {told('write', instead=finding.instead)}")
    if not every:
        print(told("no_mistake", targets=", ".join(arguments.targets)))
    return WRONG if every else 0


def _findings(target: Path) -> list[Finding]:
    if not target.exists():
        raise ConfigError(told("target_missing", target=target))
    if target.suffix == ".py":
        return check_script(target)
    if target.is_dir():
        return check_run(target)
    raise ConfigError(told("no_target", target=target))


def text_of(found: Diagnosis) -> str:
    """Format a diagnosis: what to take and why, the formats, what it saves."""
    keys = list(dict.fromkeys(key for row in found.forms for key in row.rates))
    shapes = [told("square") if key == "square" else key for key in keys]
    head = (told("format"), told("hardware"), "halfstep", *(f"{key} GFLOP/s" for key in shapes))
    rows = [
        (
            row.form,
            said(status_text(row.status)),
            said(status_text(row.here)) if row.here else "-",
            *(f"{row.rates[key] / 1e9:,.0f}" if key in row.rates else "-" for key in keys),
        )
        for row in found.forms
    ]
    lines = [
        told("take_this", policy=found.policy, reason=found.reason),
        told("source", source=found.source),
        *([told("instructions", names=", ".join(found.instructions))] * bool(found.instructions)),
        "",
        table([head, *rows], set(range(3, len(head)))),
        "",
        _savings(found),
        *(told("note", text=note) for note in found.notes),
    ]
    return "\n".join(lines)


def _savings(found: Diagnosis) -> str:
    """Say what the policy saves, in time of products and in bytes."""
    parts = []
    if found.product_times is not None:
        parts.append(told("product_times", times=found.product_times, policy=found.policy))
    cost = found.bytes_per_parameter
    if found.policy != "fp32":
        parts.append(told("as_fp32", policy=found.policy, bytes=cost[found.policy]))
    least = found.smallest
    parts.append(told("fewest_bytes", policy=least, bytes=cost[least], fp32=cost["fp32"]))
    return told("separator").join(parts)
