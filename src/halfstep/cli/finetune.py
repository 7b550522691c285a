"""``halfstep finetune classify`` and ``halfstep finetune lm``."""

from __future__ import annotations

import argparse

from halfstep.cli import train

SCRATCH, PRETRAINED = "classify-scratch", "classify-pretrained"
LORA, FULL = "lm-lora", "lm-full"


def run(arguments: argparse.Namespace) -> int:
    """Train as ``halfstep train`` does, with default settings for the kind of model that is tuned.

    A classifier that is loaded takes smaller steps than one from scratch, and all weights of a
    language model smaller ones than its adapters.
    """
    given = dict(train.given_keys(arguments))
    source = str(given.get("model.source", "scratch:"))
    if arguments.default_config == SCRATCH and not source.startswith("scratch:"):
        arguments.default_config = PRETRAINED
    if arguments.default_config == LORA and str(given.get("model.lora_r", "")).strip() == "0":
        arguments.default_config = FULL
    return train.run(arguments)
