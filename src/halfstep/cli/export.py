"""``halfstep export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep.cli.console import write_out
from halfstep.models.hf import save_gpt2
from halfstep.precision.policy import DTYPES
from halfstep.training.run_folder import load_trained


def run(arguments: argparse.Namespace) -> int:
    """Write a run's newest model, with its tokenizer, as a Hugging Face folder."""
    model, tokenizer, _ = load_trained(Path(arguments.run))
    target = Path(arguments.output)
    save_gpt2(model, target, dtype=DTYPES[arguments.dtype])
    tokenizer.save(target)
    write_out(f"{target}: {model.num_parameters():,} parameters in {arguments.dtype}")
    return 0
