"""``halfstep generate``."""

from __future__ import annotations

import argparse
import sys

import torch

from halfstep.cli.console import write_out
from halfstep.cli.lm_run import generate as generate_by_lm
from halfstep.cli.source import Source, config_of_run, open_source
from halfstep.errors import ConfigError
from halfstep.trainer.config.finetune import LMConfig
from halfstep.trainer.models.gpt.generate import generate


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model makes of it."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    tuned = config_of_run(arguments)
    if isinstance(tuned, LMConfig):
        generate_by_lm(arguments, tuned, prompt)
        return 0
    if arguments.raw:
        raise ConfigError("--raw is for runs of finetune lm, which write a template; leave it out")
    source = open_source(arguments)
    try:
        text = continue_text(
            source,
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    write_out(text)
    return 0


def continue_text(
    source: Source,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """The prompt and its continuation; with no prompt the model starts a document."""
    tokenizer = source.tokenizer
    ids = tokenizer.encode(prompt)
    if not ids:
        ids = tokenizer.encode("\n") if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    tokens_BT = torch.tensor([ids], device=source.device)
    with torch.no_grad(), source.around():
        tokens_BT = generate(
            source.model,
            tokens_BT,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token=tokenizer.end_of_text,
        )
    written = tokens_BT[0].tolist()
    return tokenizer.decode([i for i in written if i != tokenizer.end_of_text])
