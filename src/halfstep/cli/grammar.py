"""The command line's grammar; imports nothing of ours, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

# Fixed spellings of train, and the configuration key that each sets. Everything else of the
# configuration is reached by its dotted key: --schedule.warmup_steps 20.
TRAIN_OPTIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("--data", "data.train", "files, globs or folders of text (.txt .md .jsonl .py) or nanoGPT "
     ".bin; default: the standard library of this Python", {"nargs": "+", "metavar": "PATH"}),
    ("--val-data", "data.validation", "validation text; default: the last tenth of --data",
     {"nargs": "+", "metavar": "PATH"}),
    ("--tokenizer", "data.tokenizer", "bytes, bpe:N (trained on --data), or a tokenizer.json or "
     "its folder", {"metavar": "T"}),
    ("--precision", "precision", "a policy by name (halfstep explain lists them), fields such as "
     "bf16-mixed,reduce=bf16, or a .toml file", {"metavar": "P"}),
    ("--max-steps", "run.max_steps", "optimizer steps", {"metavar": "N"}),
    ("--max-seconds", "run.max_seconds", "stop, evaluate and save after this long",
     {"metavar": "S"}),
    ("--batch-size", "run.batch_size", "sequences in one optimizer step, over all micro-batches "
     "and ranks", {"metavar": "N"}),
    ("--block-size", "run.block_size", "tokens in one training sequence", {"metavar": "N"}),
    ("--grad-accum", "run.grad_accum", "micro-batches that the batch is split into",
     {"metavar": "N"}),
    ("--learning-rate", "optimizer.learning_rate", "peak learning rate", {"metavar": "LR"}),
    ("--parallel", "run.parallel", "how the ranks share the work, such as data=2,tensor=2; "
     "default: data=N for N ranks", {"metavar": "AXES"}),
    ("--seed", "run.seed", "seed of weights and batches", {"metavar": "N"}),
    ("--eval-every", "run.eval_every", "steps between evaluations", {"metavar": "N"}),
    ("--save-every", "run.save_every", "steps between checkpoints", {"metavar": "N"}),
    ("--keep", "run.keep", "checkpoints to keep", {"metavar": "N"}),
    ("--output-dir", "run.output_dir", "run folder; default runs/NAME-PRECISION-TIME",
     {"metavar": "DIR"}),
    ("--report-to", "run.report_to", "none or tensorboard", {"metavar": "WHERE"}),
    ("--device", "run.device", "auto, cpu, cuda or cuda:N", {"metavar": "D"}),
    ("--init-from", "run.init_from", "start from a local Hugging Face GPT-2 folder",
     {"metavar": "DIR"}),
)  # fmt: skip

RUNS = ("train", "finetune")
"""Commands that start a run: configured by dotted keys, on one rank or several."""

_EXIT_CODES = (
    "exit codes: 0 done, 1 failed unexpectedly, 2 usage or refused, 3 stopped by a numerics guard, "
    "4 interrupted with a checkpoint written; with --nproc, that of the rank that failed first"
)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line."""

    def error(self, message: str) -> Any:
        self.exit(2, f"halfstep: error: {message}; see {self.prog} --help\n")


def build_parser(version: str) -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="halfstep",
        description="Train in mixed precision, and account for every number on the way.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"halfstep {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_train(commands)
    add_finetune(commands, _EXIT_CODES, _add_options)
    add_predict(commands)
    add_generate(commands)
    add_evaluate(commands)
    _add_explain(commands)
    _add_formats(commands)
    _add_env(commands)
    _add_configs(commands)
    add_export(commands)
    _add_demo(commands)
    return parser


def split_launcher(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Part ``COMMAND ... -- options of torchrun`` at the ``--``; None if there is none."""
    words = list(arguments)
    if not (words and words[0] in RUNS) or "--" not in words:
        return words, None
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take ``--section.key value`` and ``--section.key=value`` pairs out of an argument list.

    Returns:
        The other arguments, and the pairs. A key at the end without a value stays with the others,
        where the parser complains about it.
    """
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and "." in key and not key.startswith((".", "/"))):
            rest.append(word)
        elif equals:
            pairs.append((key.replace("-", "_"), value))
        elif words:
            pairs.append((key.replace("-", "_"), words.pop(0)))
        else:
            rest.append(word)
    return rest, pairs


def shield_negative_value(arguments: Sequence[str]) -> list[str]:
    """Put ``--`` before the negative VALUE of ``formats``: argparse takes -1e-8 for an option."""
    words = list(arguments)
    if words[:1] != ["formats"] or "--" in words:
        return words
    values = [word for word in words if word[:1] == "-" and word[1:2] not in ("", "-", "h")]
    rest = [word for word in words if word not in values]
    return [*rest, "--", *values] if values else words


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a GPT on text",
        description="Train a GPT on text.",
        epilog="Every other key of the configuration is set by its dotted name, for example "
        "--schedule.warmup_steps 20 or --model.n_layer=4; 'halfstep configs show gpt-tiny' lists "
        f"them. {_EXIT_CODES}",
        allow_abbrev=False,
    )
    _add_options(train, "pretrain", "gpt-small-cpu", TRAIN_OPTIONS)


def _add_options(
    command: argparse.ArgumentParser,
    task: str,
    config: str,
    options: Sequence[tuple[str, str, str, dict[str, Any]]],
) -> None:
    """What every command that starts a run has, and its own fixed spellings."""
    command.set_defaults(task=task, default_config=config)
    command.add_argument(
        "--config", default=None, metavar="NAME|PATH",
        help=f"a shipped configuration (halfstep configs ls) or a TOML file; default {config}",
    )  # fmt: skip
    for flag, key, text, extra in options:
        command.add_argument(flag, dest=key, default=None, help=text, **extra)
    command.add_argument(
        "--compile", dest="run.compile", action="store_const", const=True, default=None,
        help="run the model through torch.compile",
    )  # fmt: skip
    command.add_argument(
        "--resume", action="store_true", help="go on with the run in --output-dir, bit for bit"
    )
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    command.add_argument(
        "--nproc", type=int, default=None, metavar="N",
        help="start N ranks on this machine; options of torchrun may follow after --, such as "
        "-- --max-restarts 3, or -- --nnodes 2 --node-rank 0 --master-addr HOST",
    )  # fmt: skip


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain", help="what a precision policy means, costs and needs", allow_abbrev=False
    )
    explain.add_argument(
        "policies", nargs="*", metavar="POLICY", help="names, field strings or files; default: all"
    )
    explain.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def _add_formats(commands: Any) -> None:
    formats = commands.add_parser(
        "formats",
        help="the number formats, and what each makes of a number",
        description="Without VALUE: range and precision of every format. With VALUE: the number "
        "that each format rounds it to, bit by bit, and what is lost.",
        epilog="VALUE is read as fp64, and each format rounds that once, to the nearest, ties to "
        "even.",
        allow_abbrev=False,
    )
    formats.add_argument(
        "value", nargs="?", metavar="VALUE",
        help="decimal (0.1, -1e-8), hexadecimal (0x1.8p-3), inf or nan",
    )  # fmt: skip
    formats.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env", help="what this machine is and how fast each precision is here", allow_abbrev=False
    )
    env.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    env.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_configs(commands: Any) -> None:
    configs = commands.add_parser(
        "configs", help="list, show or copy the shipped configurations", allow_abbrev=False
    )
    actions = configs.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("ls", help="names and first lines")
    show = actions.add_parser("show", help="print one with every key, default ones included")
    show.add_argument("name")
    copy = actions.add_parser("cp", help="copy one to a file to edit")
    copy.add_argument("name")
    copy.add_argument("path")


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train the default model in fp32 and bf16-mixed and compare",
        description="Train the same model on the same text in several precisions, one after the "
        "other, and print what each gave and cost.",
        allow_abbrev=False,
    )
    demo.add_argument("--config", default="gpt-small-cpu", metavar="NAME|PATH")
    demo.add_argument("--precisions", nargs="+", default=["fp32", "bf16-mixed"], metavar="P")
    demo.add_argument("--max-steps", type=int, default=100, metavar="N")
    demo.add_argument("--output-dir", default="", metavar="DIR", help="default runs/demo-TIME")


# The grammar of ``finetune`` and ``predict``; imports nothing of ours but grammar.


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


# The grammar of what is done with a trained model; imports nothing of ours.


def add_generate(commands: Any) -> None:
    """Add the command ``generate`` and its arguments."""
    generate = commands.add_parser(
        "generate", help="write text with a trained model", allow_abbrev=False
    )
    _add_source(generate)
    generate.add_argument("--prompt", default="", help="text to go on from; '-' reads stdin")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    generate.add_argument("--top-k", type=int, default=None, metavar="K")
    generate.add_argument("--top-p", type=float, default=None, metavar="P")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--raw", action="store_true",
        help="for a run of finetune lm: go on from the prompt as it is, without its template",
    )  # fmt: skip


def add_evaluate(commands: Any) -> None:
    """Add the command ``evaluate`` and its arguments."""
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a language model's loss, or a classifier's accuracy",
        allow_abbrev=False,
    )
    _add_source(evaluate)
    evaluate.add_argument(
        "--data", nargs="+", metavar="PATH",
        help="text (of finetune: records) to measure on; default: the run's validation data",
    )  # fmt: skip
    evaluate.add_argument("--batch-size", type=int, default=8, metavar="N")
    evaluate.add_argument(
        "--max-batches", type=int, default=0, metavar="N", help="0: everything once"
    )
    evaluate.add_argument(
        "--text-column", metavar="COLUMN", help="of a classifier's --data; default: as in training"
    )
    evaluate.add_argument("--label-column", metavar="COLUMN", help="likewise")
    evaluate.add_argument(
        "--drop-empty", action="store_true", help="of a classifier: leave out empty texts"
    )
    evaluate.add_argument("--json", action="store_true", help="one JSON object on stdout")


def add_export(commands: Any) -> None:
    """Add the command ``export`` and its arguments."""
    export = commands.add_parser(
        "export", help="write a trained model in another format", allow_abbrev=False
    )
    export.add_argument("--run", required=True, metavar="DIR")
    export.add_argument("--to", required=True, choices=["hf"], help="hf: a Hugging Face folder")
    export.add_argument("--output", required=True, metavar="DIR")
    export.add_argument(
        "--dtype", default=None, choices=["fp32", "bf16", "fp16"],
        help="of the weights; default fp32, of merged adapters the base's own",
    )  # fmt: skip
    export.add_argument(
        "--adapter", action="store_true",
        help="of a LoRA run: the adapter for peft, instead of merging it into its base",
    )  # fmt: skip
    _add_trust(export)


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--run", metavar="DIR",
        help="run folder; its newest checkpoint is used, of finetune its best state",
    )  # fmt: skip
    source.add_argument(
        "--model", metavar="DIR", help="local Hugging Face GPT-2 folder with its tokenizer"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--precision", default=None, metavar="P",
        help="policy of the forward pass; default: the run's own, fp32 for --model",
    )  # fmt: skip
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="for a run of finetune: run Python code that comes with its model; only for code that "
        "you have read",
    )  # fmt: skip
