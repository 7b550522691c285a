"""The command line's grammar; imports nothing of ours, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halfstep.cli.finetune_arguments import add_finetune, add_predict
from halfstep.cli.model_arguments import add_evaluate, add_export, add_generate

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
