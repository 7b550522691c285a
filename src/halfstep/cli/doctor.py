"""The command ``halfstep doctor``: which precision suits a machine, and what the machine is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from halfstep.cli.commands import Doctor
from halfstep.cli.formats import table
from halfstep.trainer.config.config import load_config
from halfstep.trainer.doctor import (
    Diagnosis,
    diagnose,
    diagnose_named,
    is_live,
    live_device,
    products_of,
    read_product,
)
from halfstep.trainer.environment import environment


def run(arguments: Doctor) -> int:
    """Print which policy each device is good for; of this machine also what is installed."""
    products = [read_product(text) for text in arguments.shapes]
    if arguments.config:
        products += products_of(load_config(arguments.config))
    every = [
        diagnose(live_device(name), tuple(products)) if is_live(name) else diagnose_named(name)
        for name in arguments.device
    ]
    here = [environment(live_device(name)) for name in arguments.device if is_live(name)]
    if arguments.json:
        values = [found.to_json() for found in every]
        if len(every) > 1:
            print(json.dumps(values, indent=1))
        else:
            print(json.dumps(values[0] | ({"environment": here[0]} if here else {}), indent=1))
    elif len(every) == 1:
        print(text_of(every[0]))
        if here:
            print(f"\n{machine_text(here[0])}")
    else:
        rows = [(name, d.policy, d.reason) for name, d in zip(arguments.device, every, strict=True)]
        print(table([("device", "take", "why"), *rows], set()))
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
        *([f"instructions: {', '.join(found.instructions)}"] * bool(found.instructions)),
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
            f"{found.policy} saves the operands of products in 16 bits for the backward, and "
            f"keeps {cost[found.policy]:g} bytes per parameter with AdamW, as fp32 does"
        )
    least = found.smallest
    parts.append(
        f"{least} keeps {cost[least]:.3g} bytes per parameter, where fp32 keeps {cost['fp32']:g}"
    )
    return "; ".join(parts)


def machine_text(report: Mapping[str, Any]) -> str:
    """Format an :func:`environment`: software and hardware, and how each policy runs here."""
    cpu = report["cpu"]
    gpus = "; ".join(
        f"{gpu['name']} ({gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB)"
        for gpu in report["gpus"]
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    bf16 = "yes" if cpu["bf16_instructions"] else "no"
    optimizer, forward = report["optimizer_kernel"], report["forward_kernels"]
    machine = [
        ("python", f"{report['python']} on {report['platform']}"),
        ("packages", packages),
        (
            "cpu",
            f"{cpu['name']}, {cpu['cores']} cores, {cpu['torch_threads']} torch threads, "
            f"{cpu['vector_instructions']}, bf16 instructions: {bf16}",
        ),
        ("memory", f"{report['memory_bytes'] / 2**30:.1f} GiB"),
        ("gpus", gpus or "none seen by torch"),
        ("device", report["device"]),
        (
            "kernels",
            f"halfstep.optim runs by {optimizer}; attention, norms and losses in bf16 by {forward}",
        ),
    ]
    policies = [(name, row["status"], row["reason"]) for name, row in report["precisions"].items()]
    head = ("precision", "here", "reason")
    return f"{table(machine, set())}\n\n{table([head, *policies], set())}"
