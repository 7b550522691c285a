"""The command ``halfstep doctor``: the precision for a machine."""

from __future__ import annotations

import json

from halfstep.cli.commands import Doctor
from halfstep.cli.formats import table
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


def run(arguments: Doctor) -> int:
    """Print which policy a device is good for."""
    products = [read_product(text) for text in arguments.shapes]
    if arguments.config:
        products += products_of(load_config(arguments.config))
    if is_live(arguments.device):
        found = diagnose(live_device(arguments.device), tuple(products))
    else:
        found = diagnose_named(arguments.device)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else text_of(found))
    return 0


def text_of(found: Diagnosis) -> str:
    """Format a diagnosis: what to take and why, the formats, what it saves."""
    keys = list(dict.fromkeys(key for row in found.forms for key in row.rates))
    head = ("format", "hardware", "halfstep", *(f"{key} GFLOP/s" for key in keys))
    rows = [
        (
            row.form,
            row.status,
            row.here or "-",
            *(f"{row.rates[key] / 1e9:,.0f}" if key in row.rates else "-" for key in keys),
        )
        for row in found.forms
    ]
    lines = [
        f"take {found.policy}: {found.reason}",
        f"source: {found.source}",
        *([f"instructions: {', '.join(found.instructions)}"] if found.instructions else []),
        "",
        table([head, *rows], set(range(3, len(head)))),
        "",
        _savings(found),
        *(f"note: {note}" for note in found.notes),
    ]
    return "\n".join(lines)


def _savings(found: Diagnosis) -> str:
    """Say what the policy saves, in time of products and in bytes."""
    parts = []
    if found.product_times is not None:
        parts.append(
            f"measured: products take {found.product_times:.2f} of fp32's time in {found.policy}"
        )
    cost = found.bytes_per_parameter
    if found.policy != "fp32":
        parts.append(
            f"{found.policy} saves the operands of products in 16 bits for the backward, and keeps "
            f"{cost[found.policy]:g} bytes per parameter with AdamW, as fp32 does"
        )
    least = found.smallest
    parts.append(f"{least} keeps {cost[least]:.3g} of fp32's {cost['fp32']:g}")
    return "; ".join(parts)
