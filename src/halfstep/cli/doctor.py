"""The command ``halfstep doctor``: which precision suits a machine, and what the machine is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from halfstep.cli.commands import Doctor
from halfstep.cli.formats import table
from halfstep.cli.words import told
from halfstep.precision.policy.devices import status_text
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
from halfstep.words import said


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
        rows = [
            (name, d.policy, said(d.reason))
            for name, d in zip(arguments.device, every, strict=True)
        ]
        print(table([(told("device"), told("take"), told("why")), *rows], set()))
    return 0


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


def machine_text(report: Mapping[str, Any]) -> str:
    """Format an :func:`environment`: software and hardware, and how each policy runs here."""
    cpu = report["cpu"]
    gpus = "; ".join(
        f"{gpu['name']} ({gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB)"
        for gpu in report["gpus"]
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    bf16 = told("yes") if cpu["bf16_instructions"] else told("no")
    optimizer, forward = report["optimizer_kernel"], report["forward_kernels"]
    machine = [
        (told("env_python"), told("on_platform", **report)),
        (told("env_packages"), packages),
        (told("env_cpu"), told("cpu", **{**cpu, "bf16": bf16})),
        (told("env_memory"), f"{report['memory_bytes'] / 2**30:.1f} GiB"),
        (told("env_gpus"), gpus or told("no_gpus")),
        (told("env_device"), report["device"]),
        (told("env_kernels"), told("kernels", optimizer=optimizer, forward=forward)),
    ]
    policies = [
        (name, said(status_text(row["status"])), said(row["reason"]))
        for name, row in report["precisions"].items()
    ]
    head = (told("precision"), told("here"), told("reason"))
    return f"{table(machine, set())}\n\n{table([head, *policies], set())}"
