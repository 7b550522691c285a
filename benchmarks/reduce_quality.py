"""Training and validation loss by the format of gradients between ranks, all else alike.

    python benchmarks/reduce_quality.py [--steps 300] [--seeds N ...] [--no-save]

Each run is ``halfstep train --nproc 2``: gpt-tiny on the standard library's source, BPE of 1024,
8 sequences of 128 tokens a step over two ranks with one thread each, fp32 weights and fp32
arithmetic. Under one seed the initial weights and the batches are the same, so that a difference is
the rounding of the wire alone. It is to be judged by what seeds differ by, and by what a difference
in the last bits of fp32 grows to: that is the run with shard=2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch

from common import save

# name: policy and layout; under shard=2 the norm for clipping is summed in another order
RUNS = {
    "fp32": ("fp32", "data=2"),
    "fp32, shard=2": ("fp32", "shard=2"),
    "bf16": ("fp32,reduce=bf16", "data=2"),
    "fp16": ("fp32,reduce=fp16", "data=2"),
}
LAST = 50
LOSSES = ("final_loss", f"mean_loss_of_last_{LAST}", "val_loss")


def one(policy: str, layout: str, steps: int, seed: int, folder: Path) -> dict:
    """One run's losses and bytes."""
    command = [sys.executable, "-m", "halfstep", "train", "--nproc", "2", "--parallel", layout,
               "--config", "gpt-tiny", "--precision", policy, "--batch-size", "8",
               "--max-steps", str(steps), "--eval-every", str(steps), "--save-every", "0",
               "--run.eval_batches=40", "--seed", str(seed), "--device", "cpu",
               "--output-dir", str(folder), "--quiet"]  # fmt: skip
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["loss"] for record in records]
    assert len(losses) == steps
    return {
        "final_loss": losses[-1],
        f"mean_loss_of_last_{LAST}": mean(losses[-LAST:]),
        "val_loss": records[-1]["val_loss"],
        "skipped": records[-1]["skipped_total"],
        "train_losses": losses,
    }


def table(summary: dict[str, dict]) -> str:
    """The summary in Markdown, as docs/distributed.md shows it."""
    titles = ("final loss", f"mean of the last {LAST}", "validation loss")
    heads = [f"{title} | to fp32, seed by seed" for title in titles]
    lines = ["| `reduce` | " + " | ".join(heads) + " |", "|---" * 7 + "|"]
    for name, row in summary.items():
        cells = [name]
        for key in LOSSES:
            cells.append(
                f"{row[key]['mean']:.3f} ± {row[key]['standard_deviation_over_seeds']:.2f}"
            )
            changes = row[key]["relative_to_fp32"]
            cells.append("" if name == "fp32" else ", ".join(f"{x * 100:+.3f} %" for x in changes))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    runs: dict[str, dict[int, dict]] = {name: {} for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for name, (policy, layout) in RUNS.items():
                place = Path(folder) / f"{policy}-{layout}-{seed}"
                runs[name][seed] = one(policy, layout, arguments.steps, seed, place)
    summary = {}
    for name, by_seed in runs.items():
        summary[name] = {}
        for key in LOSSES:
            values = [run[key] for run in by_seed.values()]
            summary[name][key] = {
                "mean": mean(values),
                "standard_deviation_over_seeds": stdev(values) if len(values) > 1 else 0.0,
                "range_over_seeds_relative": (max(values) - min(values)) / mean(values),
                "relative_to_fp32": [
                    run[key] / runs["fp32"][seed][key] - 1 for seed, run in by_seed.items()
                ],
            }
    print(table(summary))
    content = {
        "steps": arguments.steps,
        "ranks": 2,
        "batch": [8, 128],
        "runs": RUNS,
        "summary": summary,
        "seeds": {name: {str(s): run for s, run in by.items()} for name, by in runs.items()},
    }
    if not arguments.no_save:
        print(f"written: {save('reduce-quality', content, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
