"""A classifier from scratch in several precisions and seeds: accuracy, skips, tokens a second.

    python benchmarks/classify_precisions.py --train FILE --dev FILE [--runs DIR] [--seeds 1 2 3]

Every run is `halfstep finetune classify` with its defaults, a process each; one that is finished
in --runs is not run again. Accuracy is that of the best state, as the run reports it, and that of
the last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, median, stdev

import torch

from common import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", required=True)
    parser.add_argument("--dev", required=True)
    parser.add_argument("--model", default="scratch:small")
    parser.add_argument("--precisions", nargs="+",
                        default=["fp32", "bf16-mixed", "bf16-split", "fp16-mixed"])  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/classify-precisions"))
    parser.add_argument("--no-save", action="store_true")
    given = parser.parse_args()
    rows = []
    for precision in given.precisions:
        found = [measure(given, precision, seed) for seed in given.seeds]
        best = [run["accuracy"] for run in found]
        rows.append({"precision": precision, "runs": found, "mean_accuracy": mean(best),
                     "sd": stdev(best) if len(best) > 1 else 0.0})  # fmt: skip
    base = rows[0]
    speeds = [median(run["tokens_per_second"] for run in row["runs"]) for row in rows]
    print("| precision | accuracy | sd | against the first | last state | skipped | tokens/s | x |")
    print("|---|---|---|---|---|---|---|---|")
    for row, speed in zip(rows, speeds, strict=True):
        row["against_first"] = row["mean_accuracy"] - base["mean_accuracy"]
        last = mean(run["last_accuracy"] for run in row["runs"])
        skipped = sum(run["skipped"] for run in row["runs"])
        print(f"| `{row['precision']}` | {row['mean_accuracy']:.4f} | {row['sd']:.4f} | "
              f"{row['against_first']:+.4f} | {last:.4f} | {skipped} | {speed:,.0f} | "
              f"{speed / speeds[0]:.2f} |")  # fmt: skip
    if not given.no_save:
        print(f"written: {save('classify-precisions', {'rows': rows}, torch.device('cpu'))}")


def measure(given: argparse.Namespace, precision: str, seed: int) -> dict[str, float]:
    folder = given.runs / f"{precision}-{seed}"
    if not (folder / "model").is_dir():
        words = ["--train", given.train, "--dev", given.dev, "--model", given.model]
        words += ["--precision", precision, "--seed", str(seed), "--output-dir", str(folder)]
        subprocess.run(
            [sys.executable, "-m", "halfstep", "finetune", "classify", *words], check=True
        )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "seed": seed,
        "accuracy": report["accuracy"],
        "macro_f1": report["macro_f1"],
        "best_step": report["step"],
        "last_accuracy": [step["val_accuracy"] for step in steps if "val_accuracy" in step][-1],
        "skipped": steps[-1]["skipped_total"],
        "steps": len(steps),
        "tokens_per_second": median(step["tokens_per_second"] for step in steps),
        "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
    }


if __name__ == "__main__":
    main()
