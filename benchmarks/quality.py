"""Validation loss of every policy after the same steps on the same data.

    python benchmarks/quality.py [--steps 300] [--data PATH ...] [--policies P ...] [--seeds N ...]

Each policy is a run of ``halfstep train`` in a process of its own: gpt-small-cpu, BPE of 8192,
same seed, so the same initial weights and the same batches. With several seeds the spread between
them is the noise against which a difference between policies is judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch

from common import save

POLICIES = ["fp32", "bf16-mixed", "bf16-master", "fp16-mixed", "fp16-master", "bf16-pure",
            "fp16-pure"]  # fmt: skip


def one(policy: str, steps: int, data: list[str], folder: Path, seed: int) -> dict:
    command = [sys.executable, "-m", "halfstep", "train", "--config", "gpt-small-cpu"]
    command += ["--precision", policy, "--max-steps", str(steps), "--eval-every", str(steps)]
    command += [
        "--save-every",
        "0",
        "--output-dir",
        str(folder / f"{policy}-{seed}"),
        "--device",
        "cpu",
    ]
    command += ["--seed", str(seed)]
    command += ["--run.eval_batches=40"] + (["--data", *data] if data else [])
    if policy == "fp16-pure":
        command += ["--optimizer.eps", "1e-4"]  # 1e-8 is 0 in fp16
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    lines = (folder / f"{policy}-{seed}" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    return {
        "exit_code": code,
        "steps": last["step"],
        "val_loss": last.get("val_loss"),
        "skipped": last.get("skipped_total"),
        "peak_memory_bytes": last.get("peak_memory_bytes"),
        "train_losses": [json.loads(line).get("loss") for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1337])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            policy: [
                one(policy, arguments.steps, arguments.data, Path(folder), seed)
                for seed in arguments.seeds
            ]
            for policy in arguments.policies
        }
    first = arguments.policies[0]
    reference = [row["val_loss"] for row in rows[first]]
    print(f"{'policy':<26} {'val loss':>9} {'seeds':>8} {'to ' + first:>14} {'skipped':>8}")
    results = {}
    for policy, runs in rows.items():
        losses = [row["val_loss"] for row in runs]
        results[policy] = {"seeds": dict(zip(arguments.seeds, runs, strict=True))}
        if None in losses:
            print(f"{policy:<26} stopped at step {[row['steps'] for row in runs]}")
            continue
        spread = stdev(losses) if len(losses) > 1 else 0.0
        # Seed by seed: the same weights at the start, the same batches.
        change = mean(a / b - 1 for a, b in zip(losses, reference, strict=True))
        results[policy] |= {
            "val_loss": mean(losses),
            "standard_deviation_over_seeds": spread,
            f"relative_to_{first}": change,
        }
        print(
            f"{policy:<26} {mean(losses):>9.4f} {spread:>8.4f} {change:>+14.3%} "
            f"{sum(row['skipped'] for row in runs):>8}"
        )
    name = "quality-cpu" if len(arguments.seeds) == 1 else "quality-cpu-seeds"
    content = {"steps": arguments.steps, "policies": results}
    print(f"written: {save(name, content, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
