"""``halfstep finetune classify`` and ``halfstep finetune lm``."""

from __future__ import annotations

import argparse

from halfstep.cli import train

SCRATCH, PRETRAINED = "classify-scratch", "classify-pretrained"


def run(arguments: argparse.Namespace) -> int:
    """Train as ``halfstep train`` does; a model that is loaded has its own default settings."""
    source = dict(train.given_keys(arguments)).get("model.source", "scratch:")
    if arguments.default_config == SCRATCH and not str(source).startswith("scratch:"):
        arguments.default_config = PRETRAINED
    return train.run(arguments)
