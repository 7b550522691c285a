"""The command ``halfstep generate``."""

from __future__ import annotations

import sys
from dataclasses import replace

from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.config.use import Generating
from halfstep.trainer.tasks.trained import open_trained


def run(arguments: Generating) -> int:
    """Print the model's text for the prompt."""
    if arguments.prompt == "-":
        arguments = replace(arguments, prompt=sys.stdin.read())
    print(open_trained(arguments, TrainConfig.TASK).generate(arguments))
    return 0
