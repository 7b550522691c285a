"""The command ``halfstep env``."""

from __future__ import annotations

import json

from halfstep.cli.commands import Env
from halfstep.trainer.cores import probe, remark
from halfstep.trainer.environment import choose_device, environment, gemm_table


def run(arguments: Env) -> int:
    """Print a report to paste into an issue: versions, machine, precisions and GEMM rates."""
    device = choose_device(arguments.device)
    report = environment(device)
    report["gemm"] = gemm_table(device)
    report["waiting_for_cores"] = probe()
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    cpu = report["cpu"]
    lines = [
        ("python", f"{report['python']} on {report['platform']}"),
        (
            "packages",
            ", ".join(f"{name} {version}" for name, version in report["packages"].items()),
        ),
        (
            "cpu",
            f"{cpu['name']}, {cpu['cores']} cores, {cpu['torch_threads']} torch threads, "
            f"{cpu['vector_instructions']}, bf16 instructions: "
            f"{'yes' if cpu['bf16_instructions'] else 'no'}",
        ),
        ("load", _load(report["waiting_for_cores"], cpu["torch_threads"])),
        ("memory", f"{report['memory_bytes'] / 2**30:.1f} GiB"),
        (
            "gpus",
            "; ".join(
                f"{gpu['name']} ({gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB)"
                for gpu in report["gpus"]
            )
            or "none seen by torch",
        ),
        ("device", report["device"]),
        (
            "kernels",
            f"halfstep.optim runs by {report['optimizer_kernel']}; attention, norms and losses in "
            f"bf16 by {report['forward_kernels']}",
        ),
    ]
    print("\n".join(f"{key:<9} {value}" for key, value in lines))
    print(f"\n{'precision':<12} {'here':<10} reason")
    for name, row in report["precisions"].items():
        print(f"{name:<12} {row['status']:<10} {row['reason']}")
    print(f"\n{'format':<7} {'here':<10} measured matrix products (GFLOP/s)")
    for row in report["gemm"]:
        rate = row.get("gemm_flops_per_second")
        text = "-" if rate is None else f"{rate / 1e9:,.0f}"
        print(f"{row['format']:<7} {row['status']:<10} {text}")
    return 0


def _load(share: float | None, threads: int) -> str:
    """Say whether other programs use the cores, and what helps."""
    if share is None:
        return "not known: this system does not tell how long threads wait for a core"
    idle = f"the cores are free: threads waited {share:.0%} of the time for one"
    return remark(share, threads) or idle
