"""``halfstep export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep.cli.console import write_out
from halfstep.cli.lm_run import export as export_lm
from halfstep.errors import ConfigError
from halfstep.precision.policy.policy import DTYPES
from halfstep.trainer.config.finetune import ClassifyConfig, LMConfig
from halfstep.trainer.models.gpt.hf import save_gpt2
from halfstep.trainer.run.folder import load_trained, run_config
from halfstep.trainer.run.model_folder import copy_folder
from halfstep.trainer.tasks.tuned_lm import model_folder


def run(arguments: argparse.Namespace) -> int:
    """Write a run's model, with its tokenizer, as a Hugging Face folder."""
    path, target = Path(arguments.run), Path(arguments.output)
    config = run_config(path)
    if isinstance(config, LMConfig):
        export_lm(arguments, config)
        return 0
    if arguments.adapter:
        raise ConfigError(f"--adapter: {path} is not a run of finetune lm; leave it out")
    if isinstance(config, ClassifyConfig):
        if arguments.dtype not in (None, "fp32"):
            raise ConfigError(f"--dtype {arguments.dtype}: a classifier is written in fp32")
        copy_folder(model_folder(path), target)
        write_out(f"{target}: classifier in fp32")
        return 0
    model, tokenizer, _ = load_trained(path)
    dtype = arguments.dtype or "fp32"
    save_gpt2(model, target, dtype=DTYPES[dtype])
    tokenizer.save(target)
    write_out(f"{target}: {model.num_parameters():,} parameters in {dtype}")
    return 0
