"""``generate``, ``evaluate`` and ``export`` of a run of ``halfstep finetune lm``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from halfstep.cli.console import write_out
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import DTYPES, dtype_name
from halfstep.trainer.config.finetune import LMConfig
from halfstep.trainer.data.instructions.instructions import read_instructions
from halfstep.trainer.environment import choose_device
from halfstep.trainer.evaluate import Judge, perplexity
from halfstep.trainer.models.pretrained.lm import PretrainedLM, open_causal_lm
from halfstep.trainer.models.pretrained.lora import LoraLM, open_adapted_lm
from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer
from halfstep.trainer.run.model_folder import copy_folder
from halfstep.trainer.tasks.tuned_lm import (
    TunedLM,
    measure,
    model_folder,
    open_tuned_lm,
    validation_batches,
)


def generate(arguments: argparse.Namespace, config: LMConfig, prompt: str) -> None:
    """Print the answer to a prompt."""
    lm = _open(arguments, config)
    if not (prompt or arguments.raw or lm.template == "plain"):
        raise ConfigError("--prompt is empty; give what the model is to answer, or --raw")
    write_out(
        lm.answer(
            prompt,
            raw=arguments.raw,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        )
    )


def evaluate(arguments: argparse.Namespace, config: LMConfig) -> None:
    """Print loss and perplexity on the run's validation records, or on others."""
    lm = _open(arguments, config)
    data = config.data
    if arguments.data:
        data = dataclasses.replace(data, train=tuple(arguments.data), dev=tuple(arguments.data))
    rows = read_instructions(data, lm.tokenizer, config.run.seed).dev_rows
    if data.packing:
        lm.model.check_packing()
    pad_id = lm.tokenizer.wrapped.pad_id
    batches = validation_batches(rows, arguments.batch_size, pad_id, arguments.max_batches)
    judge = Judge(lm.model.loss_sum, lm.around, lm.device)
    found = measure(batches, judge, str(lm.policy))
    if arguments.json:
        numbers = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "tokens": found.targets,
            "precision": str(lm.policy),
        }
        write_out(json.dumps(numbers))
        return
    write_out(found.text.removeprefix("validation "))


def export(arguments: argparse.Namespace, config: LMConfig) -> None:
    """Write a run's best state as one model, or as an adapter."""
    run, target = Path(arguments.run), Path(arguments.output)
    folder = model_folder(run)
    if arguments.adapter:
        if not config.model.lora_r:
            raise ConfigError(f"--adapter: {run} trained all weights; leave it out")
        if arguments.dtype is not None:
            raise ConfigError("--dtype with --adapter: an adapter is written as trained, in fp32")
        copy_folder(folder, target)
        write_out(f"{target}: adapter of {config.model.source}")
        return
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    trust = arguments.trust_remote_code
    model: PretrainedLM
    if config.model.lora_r:
        model = open_adapted_lm(folder, revision=config.model.revision, trust_remote_code=trust)
    else:
        model = open_causal_lm(folder, trust_remote_code=trust)
    tokenizer = open_tokenizer(folder, max_length=config.data.max_length, trust_remote_code=trust)
    model.save_(target, {}, merge=True, dtype=dtype)
    tokenizer.save(target)
    count = sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n)
    written = dtype_name(dtype or model.stored_dtype)
    write_out(f"{target}: {count:,} parameters in {written}")
    if isinstance(model, LoraLM):
        write_out(str(model.last_merge))


def _open(arguments: argparse.Namespace, config: LMConfig) -> TunedLM:
    return open_tuned_lm(
        Path(arguments.run),
        config,
        choose_device(arguments.device),
        arguments.precision,
        trust_remote_code=arguments.trust_remote_code,
    )
