"""The grammar of ``finetune`` and ``predict``; imports nothing of ours but grammar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

Option = tuple[str, str, str, dict[str, Any]]
AddOptions = Callable[[argparse.ArgumentParser, str, str, Sequence[Option]], None]

# Fixed spellings of both tasks, and the configuration key that each sets.
_COMMON: tuple[Option, ...] = (
    ("--train", "data.train", "training data", {"nargs": "+", "metavar": "FILE"}),
    ("--dev", "data.dev", "validation data; default: split off from --train",
     {"nargs": "+", "metavar": "FILE"}),
    ("--precision", "precision", "a policy by name (halfstep explain lists them), fields such as "
     "bf16-mixed,reduce=bf16, or a .toml file", {"metavar": "P"}),
    ("--epochs", "run.epochs", "times that every example is seen", {"metavar": "N"}),
    ("--max-steps", "run.max_steps", "optimizer steps, instead of --epochs", {"metavar": "N"}),
    ("--max-seconds", "run.max_seconds", "stop, evaluate and save after this long",
     {"metavar": "S"}),
    ("--batch-size", "run.batch_size", "examples in one optimizer step, over all micro-batches "
     "and ranks", {"metavar": "N"}),
    ("--grad-accum", "run.grad_accum", "micro-batches that the batch is split into",
     {"metavar": "N"}),
    ("--learning-rate", "optimizer.learning_rate", "peak learning rate", {"metavar": "LR"}),
    ("--parallel", "run.parallel", "how the ranks share the work, such as data=2 or shard=2; "
     "default: data=N for N ranks", {"metavar": "AXES"}),
    ("--seed", "run.seed", "seed of split, weights, batches and dropout", {"metavar": "N"}),
    ("--eval-every", "run.eval_every", "steps between evaluations; default: an epoch's",
     {"metavar": "N"}),
    ("--save-every", "run.save_every", "steps between checkpoints, which also follow every "
     "evaluation", {"metavar": "N"}),
    ("--keep", "run.keep", "checkpoints to keep besides the best", {"metavar": "N"}),
    ("--patience", "run.patience", "stop after this many evaluations that are no better",
     {"metavar": "N"}),
    ("--output-dir", "run.output_dir", "run folder; default runs/NAME-PRECISION-TIME",
     {"metavar": "DIR"}),
    ("--report-to", "run.report_to", "none or tensorboard", {"metavar": "WHERE"}),
    ("--device", "run.device", "auto, cpu, cuda or cuda:N", {"metavar": "D"}),
)  # fmt: skip

CLASSIFY_OPTIONS: tuple[Option, ...] = (
    ("--model", "model.source", "scratch:tiny, scratch:small, scratch:base, a Hugging Face folder, "
     "or a name on the hub; default scratch:small", {"metavar": "MODEL"}),
    *_COMMON,
    ("--best-by", "run.best_by", "accuracy, macro_f1 or loss", {"metavar": "MEASURE"}),
    ("--labels", "data.labels", "names of the classes in order; default: found in --train",
     {"nargs": "+", "metavar": "NAME"}),
    ("--labels-file", "data.labels_file", "the same from a file, one a line", {"metavar": "FILE"}),
    ("--text-column", "data.text_column", "name of the text's column", {"metavar": "COLUMN"}),
    ("--label-column", "data.label_column", "name of the label's column", {"metavar": "COLUMN"}),
    ("--class-weights", "model.class_weights", "none, or balanced: every class counts alike",
     {"metavar": "W"}),
    ("--max-length", "model.max_length", "tokens of a text", {"metavar": "N"}),
)  # fmt: skip

LM_OPTIONS: tuple[Option, ...] = (
    ("--model", "model.source", "a Hugging Face folder, or a name on the hub",
     {"metavar": "MODEL"}),
    *_COMMON,
    ("--format", "data.format", "auto, alpaca, chat, text or prompt-completion",
     {"metavar": "F"}),
    ("--max-length", "data.max_length", "tokens of a training row", {"metavar": "N"}),
    ("--lora-r", "model.lora_r", "rank of the LoRA adapters; 0: train all weights",
     {"metavar": "R"}),
    ("--lora-alpha", "model.lora_alpha", "adapters are scaled by alpha / r", {"metavar": "A"}),
    ("--lora-targets", "model.lora_targets", "modules to adapt; default: the usual ones",
     {"nargs": "+", "metavar": "NAME"}),
)  # fmt: skip


def add_finetune(commands: Any, exit_codes: str, add_options: AddOptions) -> None:
    """``finetune classify`` and ``finetune lm``."""
    finetune = commands.add_parser(
        "finetune", help="fine-tune a text classifier or a language model", allow_abbrev=False
    )
    tasks = finetune.add_subparsers(dest="finetune_task", metavar="TASK", required=True)
    for name, config, options, text in (
        ("classify", "classify-scratch", CLASSIFY_OPTIONS,
         "Train a text classifier: CSV, TSV, JSONL, JSON or a dataset of the hub."),
        ("lm", "lm-lora", LM_OPTIONS,
         "Tune a causal language model on texts, instructions or chats, by LoRA or in full."),
    ):  # fmt: skip
        task = tasks.add_parser(
            name,
            help=text.partition(":")[0].lower() if name == "classify" else "tune a language model",
            description=text,
            epilog="Every other key of the configuration is set by its dotted name, for example "
            f"--model.dropout 0.2; 'halfstep configs show {config}' lists them. {exit_codes}",
            allow_abbrev=False,
        )
        add_options(task, name, config, options)
        task.add_argument(
            "--trust-remote-code", dest="model.trust_remote_code", action="store_const",
            const=True, default=None,
            help="run Python code that comes with the model; only for code that you have read",
        )  # fmt: skip


def add_predict(commands: Any) -> None:
    """Add the command ``predict`` and its arguments."""
    predict = commands.add_parser(
        "predict",
        help="classify texts with a trained classifier",
        description="Classify texts. Writes one JSON object a text: text, label, probability.",
        allow_abbrev=False,
    )
    source = predict.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="DIR", help="run folder of finetune classify")
    source.add_argument("--model", metavar="DIR", help="folder of a classifier")
    predict.add_argument(
        "--input", required=True, metavar="FILE|-",
        help=".jsonl, .csv, .tsv or .txt (one text a line); '-' reads stdin",
    )  # fmt: skip
    predict.add_argument(
        "--output", default="-", metavar="FILE|-", help="JSONL; '-', the default, is stdout"
    )
    predict.add_argument("--text-column", default="", metavar="COLUMN")
    predict.add_argument("--batch-size", type=int, default=64, metavar="N")
    predict.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    predict.add_argument(
        "--precision", default=None, metavar="P",
        help="policy of the forward pass; default: the run's own, fp32 for --model",
    )  # fmt: skip
    predict.add_argument(
        "--trust-remote-code", action="store_true",
        help="run Python code that comes with the model; only for code that you have read",
    )  # fmt: skip
