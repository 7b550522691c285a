"""The command ``halfstep evaluate``."""

from __future__ import annotations

import json
import sys

from halfstep.cli.console import RunDisplay
from halfstep.errors import ConfigError
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.config.use import Evaluating
from halfstep.trainer.memory import require_rows
from halfstep.trainer.tasks.trained import open_trained


def run(arguments: Evaluating) -> int:
    """Print how good a trained model is: loss and perplexity, or a classifier's report."""
    if arguments.batch_size < 1 or arguments.max_batches < 0:
        raise ConfigError("--batch-size must be >= 1 and --max-batches >= 0")
    require_rows(arguments.batch_size, "--batch-size")
    trained = open_trained(arguments, TrainConfig.TASK)
    with RunDisplay("evaluate") as display:
        found = trained.evaluate(arguments, display.prepared)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(found.values, ensure_ascii=False) if arguments.json else found.text)
    return 0
