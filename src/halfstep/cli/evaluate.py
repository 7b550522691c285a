"""``halfstep evaluate``."""

from __future__ import annotations

import argparse
import dataclasses
import json

from halfstep.cli.classify_run import evaluate as evaluate_classifier
from halfstep.cli.console import RunDisplay, write_out
from halfstep.cli.lm_run import evaluate as evaluate_lm
from halfstep.cli.source import config_of_run, open_source
from halfstep.errors import ConfigError
from halfstep.trainer.config.finetune import ClassifyConfig, LMConfig
from halfstep.trainer.data.corpus.batches import validation_batches
from halfstep.trainer.data.corpus.prepare import prepare, prepare_one
from halfstep.trainer.evaluate import Judge, evaluate, perplexity, tokens_per_byte
from halfstep.trainer.memory import require_rows


def run(arguments: argparse.Namespace) -> int:
    """Print how good a trained model is: loss and perplexity, or a classifier's report."""
    if arguments.batch_size < 1 or arguments.max_batches < 0:
        raise ConfigError("--batch-size must be >= 1 and --max-batches >= 0")
    require_rows(arguments.batch_size, "--batch-size")
    tuned = config_of_run(arguments)
    if isinstance(tuned, LMConfig):
        evaluate_lm(arguments, tuned)
        return 0
    if isinstance(tuned, ClassifyConfig):
        evaluate_classifier(arguments, tuned)
        return 0
    if arguments.text_column or arguments.label_column:
        raise ConfigError(
            "--text-column and --label-column are for classifiers: a GPT is measured on all of the "
            "text of --data"
        )
    source = open_source(arguments)
    config = source.config
    if config is None and not arguments.data:
        raise ConfigError("evaluate --model needs --data, the text to measure on")
    with RunDisplay("evaluate") as display:
        if config is None or arguments.data:
            cache = config.data.cache_dir if config else ""
            tokens = prepare_one(tuple(arguments.data), source.tokenizer, cache, display.prepared)
        else:
            data = dataclasses.replace(config.data, tokenizer=f"{arguments.run}/tokenizer")
            tokens = prepare(data, progress=display.prepared).validation
    result = evaluate(
        validation_batches(
            tokens,
            block_size=config.block_size if config else source.model.config.block_size,
            batch_size=arguments.batch_size,
            max_batches=arguments.max_batches or None,
        ),
        Judge(source.model.loss_sum, source.around, source.device),
        tokens_per_byte(tokens),
    )
    numbers = {
        "loss": result.loss,
        "perplexity": perplexity(result.loss),
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.targets,
        "precision": str(source.policy),
    }
    if arguments.json:
        write_out(json.dumps({key: value for key, value in numbers.items() if value is not None}))
        return 0
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
    write_out(
        f"loss {result.loss:.4f} nats per token, perplexity {numbers['perplexity']:.2f}{bits}, "
        f"on {result.targets:,} tokens in {source.policy}"
    )
    return 0
