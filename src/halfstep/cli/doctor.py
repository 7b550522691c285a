"""The command ``halfstep doctor``: which precision suits a machine, and what the machine is."""

from __future__ import annotations

import json
from typing import Any

from halfstep.cli.commands import Doctor
from halfstep.shown import aligned
from halfstep.trainer.doctor import Diagnosis, diagnose, diagnose_named, is_live, read_product
from halfstep.trainer.environment import choose_device, environment


def run(arguments: Doctor) -> int:
    """Print which policy each device is good for; of this machine also what is installed."""
    products = tuple(read_product(text) for text in arguments.shapes)
    every = [
        diagnose(choose_device(name), products) if is_live(name) else diagnose_named(name)
        for name in arguments.device
    ]
    if len(every) > 1:
        if arguments.json:
            print(json.dumps([found.to_json() for found in every], indent=1))
            return 0
        rows = [(name, d.policy, d.reason) for name, d in zip(arguments.device, every, strict=True)]
        print(aligned([("device", "take", "why"), *rows]))
        return 0
    (name,), (found,) = arguments.device, every
    here = environment(choose_device(name)) if is_live(name) else None
    if arguments.json:
        print(json.dumps(found.to_json() | ({"environment": here} if here else {}), indent=1))
        return 0
    print(_text(found))
    if here:
        print(f"\n{_machine(here)}")
    return 0


def _text(found: Diagnosis) -> str:
    """Format a diagnosis: what to take and why, the formats, what it saves."""
    keys = list(dict.fromkeys(key for row in found.forms for key in row.rates))
    rows = [("format", "hardware", "halfstep", *(f"{key} GFLOP/s" for key in keys))]
    for row in found.forms:
        rates = (f"{row.rates[key] / 1e9:,.0f}" if key in row.rates else "-" for key in keys)
        rows.append((row.form, row.status, row.here or "-", *rates))
    cost, least, saved = found.bytes_per_parameter, found.smallest, []
    if found.product_times is not None:
        saved.append(
            f"measured: products take {found.product_times:.2f} of fp32's time in {found.policy}"
        )
    if found.policy != "fp32":
        saved.append(
            f"{found.policy} saves the operands of products in 16 bits for the backward, and "
            f"keeps {cost[found.policy]:g} bytes per parameter with AdamW, as fp32 does"
        )
    saved.append(
        f"{least} keeps {cost[least]:.3g} bytes per parameter, where fp32 keeps {cost['fp32']:g}"
    )
    lines = [f"take {found.policy}: {found.reason}", f"source: {found.source}"]
    if found.instructions:
        lines.append(f"instructions: {', '.join(found.instructions)}")
    lines += ["", aligned(rows, range(3, len(rows[0]))), "", "; ".join(saved)]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _machine(report: dict[str, Any]) -> str:
    """Format an :func:`environment`: software and hardware, and how each policy runs here."""
    policies = [(name, row["status"], row["reason"]) for name, row in report["precisions"].items()]
    machine = [(key, _plain(value)) for key, value in report.items() if key != "precisions"]
    return f"{aligned(machine)}\n\n{aligned([('precision', 'here', 'reason'), *policies])}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return "; ".join(map(_plain, value)) or "none" if isinstance(value, list) else str(value)
