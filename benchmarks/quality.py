"""Validation loss of every policy after the same steps on the same data.

    python benchmarks/quality.py [--steps 300] [--data PATH ...] [--policies P ...]

Each policy is a run of ``halfstep train`` in a process of its own: gpt-small-cpu, BPE of 8192,
same seed, so the same initial weights and the same batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from common import save

POLICIES = ["fp32", "bf16-mixed", "bf16-master", "fp16-mixed", "fp16-master", "bf16-pure",
            "fp16-pure"]  # fmt: skip


def one(policy: str, steps: int, data: list[str], folder: Path) -> dict:
    command = [sys.executable, "-m", "halfstep", "train", "--config", "gpt-small-cpu"]
    command += ["--precision", policy, "--max-steps", str(steps), "--eval-every", str(steps)]
    command += ["--save-every", "0", "--output-dir", str(folder / policy), "--device", "cpu"]
    command += ["--run.eval_batches=40"] + (["--data", *data] if data else [])
    if policy == "fp16-pure":
        command += ["--optimizer.eps", "1e-4"]  # 1e-8 is 0 in fp16
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    lines = (folder / policy / "metrics.jsonl").read_text().splitlines()
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            policy: one(policy, arguments.steps, arguments.data, Path(folder))
            for policy in arguments.policies
        }
    reference = rows["fp32"]["val_loss"]
    print(f"{'policy':<12} {'val loss':>9} {'to fp32':>8} {'skipped':>8}")
    for policy, row in rows.items():
        if row["val_loss"] is None:
            print(f"{policy:<12} stopped at step {row['steps']}")
            continue
        row["relative_to_fp32"] = row["val_loss"] / reference - 1
        print(
            f"{policy:<12} {row['val_loss']:>9.4f} {row['relative_to_fp32']:>+8.2%} "
            f"{row['skipped']:>8}"
        )
    print(f"written: {save('quality-cpu', {'policies': rows}, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
