"""Labels for many texts: ``halfstep predict`` beside the text-classification pipeline.

    python benchmarks/predict.py [--run FOLDER] [--steps N] [--rounds N] [--threads N] [--no-save]

One run of finetune classify serves all rows: --run, or english_encoder.py's encoder
fine-tuned for --steps steps on docstring_data.py's task. Each row labels the same dev texts,
repeated up to --texts; a row's seconds begin at the texts and end at their labels, tokenizer
included. The pipeline gets its texts sorted by length, which its documentation advises and halfstep
does by itself, and its model in bf16 (``dtype``). Every row runs at each of the batch sizes, rows
take turns in rounds, and a row's fastest batch size counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

import docstring_data
from common import save, summary
from english_encoder import pretrained_folder
from halfstep.trainer.config.tasks import Use
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import read_labelled
from halfstep.trainer.run import run_config
from halfstep.trainer.tasks.classify import TrainedClassifier

CPU = torch.device("cpu")
BATCH_SIZES = (16, 32, 64, 128)
MAX_LENGTH = 64
Labels = Callable[[list[str], int], list[str]]


def trained(arguments: argparse.Namespace, data: Path) -> Path:
    """The folder of a run of ``finetune classify``."""
    command = [sys.executable, "-m", "halfstep", "finetune", "classify", "--quiet"]
    command += ["--train", str(data / "train.jsonl"), "--dev", str(data / "dev.jsonl")]
    command += ["--model", str(pretrained_folder(None)), "--precision", "bf16-mixed"]
    command += ["--max-steps", str(arguments.steps), "--eval-every", str(arguments.steps)]
    command += ["--batch-size", "32", "--max-length", str(MAX_LENGTH), "--learning-rate", "3e-4"]
    command += ["--device", "cpu", "--output-dir", str(data / "run")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return data / "run"


def by_halfstep(folder: Path, policy: str) -> Labels:
    """What ``halfstep predict`` does between its files."""
    use = Use(run=str(folder), device="cpu", precision=policy)
    model = TrainedClassifier(folder, run_config(folder)).open(use)
    model.tokenizer.max_length = MAX_LENGTH
    return lambda texts, batch_size: [label for _, label, _ in model.predict(texts, batch_size)]


def by_pipeline(folder: Path, dtype: torch.dtype) -> Labels:
    """A pipeline whose batches hold texts of similar length."""
    pipe = pipeline("text-classification", model=str(folder / "model"), dtype=dtype, device="cpu")

    def labels(texts: list[str], batch_size: int) -> list[str]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        ordered = [texts[i] for i in order]
        found = pipe(ordered, batch_size=batch_size, truncation=True, max_length=MAX_LENGTH)
        placed = [""] * len(texts)
        for i, each in zip(order, found, strict=True):
            placed[i] = each["label"]
        return placed

    return labels


def measure(rows: dict[str, Labels], texts: list[str], truth: list[str], rounds: int) -> dict:
    """Each row's times by batch size, and its accuracy, from rounds in which rows take turns."""
    seconds = {(name, size): [] for name in rows for size in BATCH_SIZES}
    accuracy = {}
    for label in rows.values():
        label(texts[:256], BATCH_SIZES[0])  # first calls compile and allocate
    for _ in range(rounds):
        for size in BATCH_SIZES:
            for name, label in rows.items():
                begin = time.perf_counter()
                found = label(texts, size)
                seconds[name, size].append(time.perf_counter() - begin)
                right = sum(a == b for a, b in zip(found, truth, strict=True))
                accuracy[name] = right / len(truth)
    results = {}
    for name in rows:
        best = min(BATCH_SIZES, key=lambda size: min(seconds[name, size]))
        found = summary(seconds[name, best])
        per_second = len(texts) / found["min_seconds"]
        results[name] = {"batch_size": best, "accuracy": accuracy[name],
                         "texts_per_second": per_second, **found}  # fmt: skip
    return results


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a run of finetune classify, of these labels")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        train, dev, about = docstring_data.write(Path(place))
        folder = arguments.run or trained(arguments, Path(place))
        data = read_labelled(LabelledConfig(train=(str(train),), dev=(str(dev),)), 0)
        times = -(-arguments.texts // len(data.dev.texts))
        texts = (data.dev.texts * times)[: arguments.texts]
        truth = ([data.names[i] for i in data.dev.labels] * times)[: arguments.texts]
        rows = {
            "pipeline fp32": by_pipeline(folder, torch.float32),
            "pipeline bf16": by_pipeline(folder, torch.bfloat16),
            "halfstep fp32": by_halfstep(folder, "fp32"),
            "halfstep bf16-mixed": by_halfstep(folder, "bf16-mixed"),
            "halfstep bf16-pure": by_halfstep(folder, "bf16-pure"),
        }
        found = measure(rows, texts, truth, arguments.rounds)
    base = found["pipeline bf16"]["texts_per_second"]
    print("| row | batch | texts/s | of pipeline bf16 | accuracy |\n|---|---:|---:|---:|---:|")
    for name, row in found.items():
        print(f"| {name} | {row['batch_size']} | {row['texts_per_second']:.0f} "
              f"| {row['texts_per_second'] / base:.2f} | {row['accuracy']:.4f} |")  # fmt: skip
    if not arguments.no_save:
        results = {"task": about["task"], "texts": len(texts), "max_length": MAX_LENGTH,
                   "threads": arguments.threads, "rows": found}  # fmt: skip
        print(f"\nwritten: {save('predict', results, CPU)}")


if __name__ == "__main__":
    main()
