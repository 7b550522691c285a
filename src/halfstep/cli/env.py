"""The command ``halfstep env``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from halfstep.cli.commands import Env
from halfstep.cli.words import told
from halfstep.precision.policy.devices import status_text
from halfstep.shown import padded
from halfstep.trainer.cores import probe, remark
from halfstep.trainer.environment import choose_device, environment, gemm_table
from halfstep.words import said


def run(arguments: Env) -> int:
    """Print a report to paste into an issue: versions, machine, precisions and GEMM rates."""
    device = choose_device(arguments.device)
    report = environment(device)
    report["gemm"] = gemm_table(device)
    report["waiting_for_cores"] = probe()
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    _print([9], *_machine(report))
    print()
    rows = [
        (name, said(status_text(row["status"])), said(row["reason"]))
        for name, row in report["precisions"].items()
    ]
    _print([12, 10], (told("precision"), told("here"), told("reason")), *rows)
    print()
    rows = [(row["format"], said(status_text(row["status"])), _rate(row)) for row in report["gemm"]]
    _print([7, 10], (told("format"), told("here"), told("measured_products")), *rows)
    return 0


def _print(widths: list[int], *rows: tuple[str, ...]) -> None:
    """Print rows whose columns but the last have so many columns of the terminal."""
    for *first, last in rows:
        cells = [padded(cell, width) for cell, width in zip(first, widths, strict=True)]
        print(*cells, last)


def _machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the report says of software and hardware, a name and a line for each part."""
    cpu = report["cpu"]
    gpus = "; ".join(
        f"{gpu['name']} ({gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB)"
        for gpu in report["gpus"]
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    optimizer, forward = report["optimizer_kernel"], report["forward_kernels"]
    return [
        (told("env_python"), told("on_platform", **report)),
        (told("env_packages"), packages),
        (told("env_cpu"), told("cpu", **cpu, bf16=_yes(cpu["bf16_instructions"]))),
        (told("env_load"), _load(report["waiting_for_cores"], cpu["torch_threads"])),
        (told("env_memory"), f"{report['memory_bytes'] / 2**30:.1f} GiB"),
        (told("env_gpus"), gpus or told("no_gpus")),
        (told("env_device"), report["device"]),
        (told("env_kernels"), told("kernels", optimizer=optimizer, forward=forward)),
    ]


def _yes(value: bool) -> str:
    return told("yes") if value else told("no")


def _rate(row: Mapping[str, Any]) -> str:
    rate = row.get("gemm_flops_per_second")
    return "-" if rate is None else f"{rate / 1e9:,.0f}"


def _load(share: float | None, threads: int) -> str:
    """Say whether other programs use the cores, and what helps."""
    if share is None:
        return told("load_unknown")
    return remark(share, threads) or told("load_free", share=share)
