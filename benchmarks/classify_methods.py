"""One classifier, one data set, all the ways to train it: the tutorials' table with our rows in it.

    python benchmarks/classify_methods.py [--train FILE --dev FILE] [--max-steps N | --epochs N]
        [--rounds N] [--rows NAME ...] [--layers N --width N | --model FOLDER] [--full] [--no-save]
    python benchmarks/classify_methods.py --nine [--train FILE --dev FILE] [--keep FOLDER] [...]

``--nine`` (``make ways``) is the table of the ways that the tutorials compare, of classify_ways.py,
with what stands against the rows that cannot run; its defaults are a smaller model and one round
that is long enough to learn something.

A BERT with random weights and a WordPiece tokenizer made on the data, or the pretrained encoder of
--model with a new head, are written to a folder once (--model minilm: english_encoder.py's);
every row loads them, in a process of its own (rows of "2 x": two), and takes the same number of
steps over the same examples with the same optimizer and learning rates. Without --train the data is
docstring_data.py's. Peers train on random batches padded to the longest text of the batch, as their
tutorials do; the rows "length groups" batch similar lengths, as halfstep does, so that the gain of
that can be told from the rest.

Rows take turns in rounds, each round in another order; the fastest of a row's rounds is compared,
since what disturbs a run on a shared machine only ever adds. A CPU without bf16 instructions takes
some 10 to 60 times as long for torch's products in bf16 and fp16: peers' rows in them take
--short-steps steps there, their seconds are extrapolated (marked ~) and they have no accuracy,
unless --full.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

import docstring_data
from classify_rows import ROWS
from classify_ways import DEFAULTS, NINE, absent, note
from common import save
from english_encoder import pretrained_folder
from halfstep.precision.casting.autocast import cpu_has_bf16
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import read_labelled

HERE = Path(__file__).parent
TWO = [name for name in ROWS if name.startswith("2 x ")]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]",
           "sep_token": "[SEP]", "mask_token": "[MASK]"}  # fmt: skip
ROW_SECONDS = 3600
MINILM = "minilm"
FREE = ("rows", "rounds", "keep", "no_save", "nine", "short_steps", "full", "threads")
"""Options that do not change what is prepared."""
PACKAGES = ("accelerate", "lightning", "transformers")


def prepare(arguments: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    """Data, model and tokenizer of all rows; the job that rows get, and what to tell of it."""
    train, dev, about = arguments.train, arguments.dev, {"task": "given files"}
    if not train:
        train, dev, about = docstring_data.write(folder)
    config = LabelledConfig(
        train=(str(train),), dev=(str(dev),) if dev else (), labels=tuple(arguments.labels)
    )
    data = read_labelled(config, arguments.seed)
    labels = list(data.names)
    for name, part in (("train", data.train), ("dev", data.dev)):
        rows = zip(part.texts, (labels[i] for i in part.labels), strict=True)
        docstring_data.write_jsonl(folder / f"{name}.jsonl", rows)
    model = folder / "model"
    torch.manual_seed(arguments.seed)
    names = dict(enumerate(labels))
    classes: dict[str, Any] = {"id2label": names, "label2id": {n: i for i, n in names.items()}}
    if arguments.model:
        network = pretrained(arguments.model, classes, model)
    else:
        network = from_scratch(arguments, data.train.texts, classes, model)
    examples = len(data.train.texts)
    steps = arguments.max_steps
    if arguments.epochs:
        steps = math.ceil(arguments.epochs * math.ceil(examples / arguments.batch_size))
    job = {
        "model": str(model), "train": str(folder / "train.jsonl"),
        "dev": str(folder / "dev.jsonl"), "labels": labels, "steps": steps,
        "warmup": max(1, int(0.06 * steps)), "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate, "max_length": arguments.max_length,
        "seed": arguments.seed, "device": arguments.device,
    }  # fmt: skip
    about |= {
        "examples": {"train": examples, "dev": len(data.dev.texts)}, "classes": len(labels),
        "parameters": sum(p.numel() for p in network.parameters()),
        "layers": network.config.num_hidden_layers, "width": network.config.hidden_size,
        "pretrained": arguments.model,
        "largest_class_of_dev": max(Counter(data.dev.labels).values()) / len(data.dev.labels),
    }  # fmt: skip
    return job, about


def pretrained(source: str, classes: dict[str, Any], folder: Path) -> PreTrainedModel:
    """An encoder with a new head, and its tokenizer; both are written to the folder."""
    given = pretrained_folder(None if source == MINILM else Path(source))
    AutoTokenizer.from_pretrained(given).save_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(given, **classes)
    network.save_pretrained(folder)
    return network


def from_scratch(
    arguments: argparse.Namespace, texts: list[str], classes: dict[str, Any], folder: Path
) -> PreTrainedModel:
    """A BERT with random weights and a tokenizer of the texts; both are written to the folder."""
    tokenizer = make_tokenizer(texts, arguments.vocabulary)
    tokenizer.save_pretrained(folder)
    shape = BertConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=arguments.width,
        num_hidden_layers=arguments.layers, num_attention_heads=max(1, arguments.width // 64),
        intermediate_size=4 * arguments.width, max_position_embeddings=arguments.max_length,
        **classes,
    )  # fmt: skip
    network = BertForSequenceClassification(shape)
    network.save_pretrained(folder)
    return network


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """BERT's: Chinese characters one by one, other words in pieces."""
    engine = BertWordPieceTokenizer(lowercase=True)
    engine.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=engine._tokenizer, model_input_names=inputs, **SPECIAL
    )


def is_slow(name: str, device: str) -> bool:
    """Whether the row computes with what this CPU lacks; halfstep goes through fp32 kernels."""
    if device != "cpu":
        return False
    lacking = "fp16" in name or ("bf16" in name and not cpu_has_bf16())
    return lacking and "halfstep" not in name


def run_row(name: str, job: dict, threads: int, folder: Path) -> dict:
    """One training in processes of its own; ``{"failed": ...}`` if it ends with an error."""
    ranks = 2 if name in TWO else 1
    spawns = "spawn" in name  # its processes are its own affair
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job))
    command = [sys.executable]
    if ranks > 1 and not spawns:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                    "--nproc-per-node", str(ranks)]  # fmt: skip
    command += [str(HERE / "classify_rows.py"), name, str(job_file), str(folder)]
    variables = {
        "OMP_NUM_THREADS": str(max(1, threads // ranks)), "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=os.environ | variables, cwd=folder, capture_output=True, text=True,
            check=False, timeout=ROW_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {ROW_SECONDS} s"}
    wall = time.perf_counter() - begin
    files = sorted(folder.glob("rank-*.json"))
    if done.returncode or len(files) != ranks:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        raised = [line for line in told if "Error" in line and "ChildFailed" not in line]
        return {"failed": (raised or told or ["no word"])[-1].strip(), "wall_seconds": wall}
    found = [json.loads(file.read_text()) for file in files]
    first = found[0]
    first["train_seconds"] = max(rank["train_seconds"] for rank in found)
    for key in ("peak_bytes", "resident_bytes_before"):
        first[key] = max(rank[key] or 0 for rank in found) or None
    first["extrapolated"] = first["steps"] < job["steps"]
    first["whole_train_seconds"] = first["train_seconds"]
    if first["extrapolated"]:  # without what only the first step costs
        share = first.get("share_after_first_step", (first["steps"] - 1) / job["steps"])
        first["whole_train_seconds"] = first["seconds_after_first_step"] / share
    return first | {"wall_seconds": wall, "processes": ranks}


def condense(rounds: list[dict]) -> dict:
    """A row's rounds as one: fastest and median seconds, accuracy of each."""
    good = [r for r in rounds if "failed" not in r]
    if not good:
        return {"failed": rounds[-1]["failed"]}
    seconds = [r["whole_train_seconds"] for r in good]
    accuracies = [r["accuracy"] for r in good if r["accuracy"] is not None]
    peaks = [r["peak_bytes"] for r in good if r["peak_bytes"]]
    return {
        "seconds": min(seconds),
        "median_seconds": median(seconds),
        "evaluation_seconds": min(r["evaluation_seconds"] for r in good),
        "wall_seconds": min(r["wall_seconds"] for r in good),
        "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "peak_bytes": max(peaks, default=None),
        "skipped": good[-1]["skipped"],
        "outside_steps_seconds": min(r.get("outside_steps_seconds", 0.0) for r in good),
        "extrapolated": any(r["extrapolated"] for r in good),
        "processes": good[0]["processes"],
        "rounds": rounds,
    }


def table(rows: dict[str, dict], threads: int) -> list[str]:
    """The Markdown table; rows that were not run say why."""
    base = rows.get("torch fp32", {}).get("seconds")
    lines = ["| row | processes x threads | train s | evaluation s | accuracy | peak MB | skipped "
             "| torch fp32 / row | note |", "|---|---|" + "---:|" * 6 + "---|"]  # fmt: skip
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | {'| ' * 6}| {row['failed'][:300]} |")
            continue
        mark = "~" if row["extrapolated"] else ""
        cells = [name, f"{row['processes']} x {max(1, threads // row['processes'])}",
                 f"{mark}{row['seconds']:.1f}",
                 "-" if mark else f"{row['evaluation_seconds']:.1f}",
                 "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
                 "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
                 "-" if row["skipped"] is None else str(row["skipped"]),
                 "-" if not base else f"{mark}{base / row['seconds']:.2f}",
                 note(name, row)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def verdicts(rows: dict[str, dict], dev_examples: int) -> list[str]:
    """Who is fastest among rows of equal accuracy, for one process and for two."""
    found = []
    for processes in (1, 2):
        known = {n: r for n, r in rows.items() if r.get("processes") == processes}
        judged = {n: r for n, r in known.items() if r["accuracy"] is not None}
        if not judged:
            continue
        best = max(r["accuracy"] for r in judged.values())
        margin = 2 * math.sqrt(best * (1 - best) / dev_examples)
        equal = {n: r for n, r in judged.items() if r["accuracy"] >= best - margin}
        worse = [n for n in judged if n not in equal]
        order = sorted(equal, key=lambda n: equal[n]["seconds"])
        is_ours = {n: n.removeprefix("2 x ").startswith("halfstep") for n in order}
        us = next((n for n in order if is_ours[n]), None)
        them = next((n for n in order if not is_ours[n]), None)
        where = f"{processes} process{'es' if processes > 1 else ''}, accuracy within {margin:.3f}"
        line = f"{where} of the best ({best:.4f}): fastest is {order[0]}"
        if us and them:
            ratio = equal[them]["seconds"] / equal[us]["seconds"]
            word = "halfstep is the fastest" if is_ours[order[0]] else "halfstep is NOT the fastest"
            line += f"; {word}: {us} takes {1 / ratio:.2f} of the seconds of {them}"
        found.append(line + (f"; less accurate: {', '.join(worse)}" if worse else ""))
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, help="labelled texts; default: docstrings")
    parser.add_argument("--dev", type=Path, help="default with --train: a tenth of it")
    parser.add_argument("--labels", nargs="*", default=[], help="of --train, in order of their ids")
    parser.add_argument("--nine", action="store_true", help="the rows of the tutorials' table")
    parser.add_argument("--max-steps", type=int, default=120)
    parser.add_argument("--epochs", type=float, default=0.0, help="instead of --max-steps")
    parser.add_argument("--short-steps", type=int, default=4, help="of rows marked ~; 2 or more")
    parser.add_argument("--full", action="store_true", help="all steps in all rows")
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--model", help=f"a pretrained encoder's folder, or {MINILM}")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of one process; two share them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", help="default: all")
    parser.add_argument("--keep", type=Path, help="keep finished rows here, and go on from them")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--no-save", action="store_true")
    if "--nine" in (sys.argv[1:] if words is None else words):
        parser.set_defaults(**DEFAULTS)
    found = parser.parse_args(words)
    missing = absent(found.device)
    found.rows = found.rows or [n for n in (NINE if found.nine else ROWS) if n not in missing]
    if asked := [name for name in found.rows if name in missing]:
        parser.error(f"{asked[0]}: {missing[asked[0]]}")
    return found


def prepared(arguments: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    """What ``prepare`` makes in a folder; once, where the folder is kept."""
    asked = {k: str(v) for k, v in vars(arguments).items() if k not in FREE}
    file = folder / "prepared.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        job, about = prepare(arguments, folder)
        file.write_text(json.dumps({"asked": asked, "job": job, "about": about}))
    found = json.loads(file.read_text())
    if found["asked"] != asked:
        raise SystemExit(f"{folder} was made with other options; give another --keep")
    return found["job"], found["about"]


def kept_row(name: str, job: dict, threads: int, folder: Path) -> dict:
    """A row's result, which stands in its folder where it was run before."""
    file = folder / "row.json"
    if not file.exists():
        row = run_row(name, job, threads, folder)
        if "failed" in row:
            return row
        file.write_text(json.dumps(row))
    return json.loads(file.read_text())


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    disable_progress_bar()
    rounds: dict[str, list[dict]] = {name: [] for name in arguments.rows}
    with tempfile.TemporaryDirectory() as place:
        place = arguments.keep.absolute() if arguments.keep else Path(place)
        job, about = prepared(arguments, place)
        print(f"{about['task']}: {about['examples']}, {about['classes']} classes; BERT of "
              f"{about['parameters']:,} parameters; {job['steps']} steps of {job['batch_size']} "
              f"texts of up to {job['max_length']} tokens")  # fmt: skip
        for number in range(arguments.rounds):
            for name in random.Random(number).sample(arguments.rows, len(arguments.rows)):
                short = is_slow(name, arguments.device) and not arguments.full
                if short and number:
                    continue  # no figure to be proud of is made of these
                count = min(job["steps"], max(2, arguments.short_steps)) if short else job["steps"]
                short = count < job["steps"]
                row_job = job | {"count": count, "short": short}
                folder = place / f"{number}-{[*ROWS].index(name)}"
                row = kept_row(name, row_job, arguments.threads, folder)
                rounds[name].append(row)
                told = row.get("failed") or f"{row['whole_train_seconds']:.1f} s"
                if outside := row.get("outside_steps_seconds"):
                    told += f", {outside:.1f} s of them outside of the steps"
                print(f"round {number + 1}: {name}: {told}", flush=True)
    rows = {name: condense(found) for name, found in rounds.items()}
    if arguments.nine:
        rows |= {
            name: {"failed": f"not run: {why}"} for name, why in absent(arguments.device).items()
        }
    found = verdicts(rows, about["examples"]["dev"])
    print("", *table(rows, arguments.threads), "", *found, sep="\n")
    print(f"\nthe largest class alone would give an accuracy of {about['largest_class_of_dev']:.4f}"
          "\ntrain s: the fastest round; ~: extrapolated from a few steps; peak MB: resident set "
          "of the largest process, on a GPU torch's allocations there; skipped -: not counted "
          "by the method")  # fmt: skip
    outside = {n: r["outside_steps_seconds"] for n, r in rows.items() if r.get("processes")}
    told = [f"{n} {s:.1f}" for n, s in outside.items() if s and not rows[n]["extrapolated"]]
    if told:
        print("of halfstep's train s, its measurement of the processor, metrics and the last "
              f"checkpoint took: {', '.join(told)}; no other row writes a checkpoint")  # fmt: skip
    if not arguments.no_save:
        results = {
            "data_and_model": about,
            "job": {k: v for k, v in job.items() if k not in ("model", "train", "dev")},
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "load_average_at_end": os.getloadavg(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "verdicts": found,
            "rows": rows,
        }
        title = "classify-ways" if arguments.nine else "classify-methods"
        title += "-cuda" * (arguments.device == "cuda")
        print(f"\nwritten: {save(title, results, torch.device(arguments.device))}")


if __name__ == "__main__":
    main()
