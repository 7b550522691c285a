"""The grammar of what is done with a trained model; imports nothing of ours."""

from __future__ import annotations

import argparse
from typing import Any


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
