"""The commands of a trained model: ``predict``, ``generate``, ``evaluate`` and ``export``."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from halfstep.errors import ConfigError
from halfstep.trainer import part
from halfstep.trainer.config.tasks import (
    ClassifyConfig,
    Evaluating,
    Exporting,
    Generating,
    LMConfig,
    ModuleConfig,
    Predicting,
    TrainConfig,
    Use,
)
from halfstep.trainer.data.labelled import read_texts
from halfstep.trainer.run import run_config

TRAINED: Mapping[str, str] = {
    TrainConfig.TASK: "trainer.tasks.text:TrainedText",
    ClassifyConfig.TASK: "trainer.tasks.classify:TrainedClassifier",
    LMConfig.TASK: "trainer.tasks.lm:TrainedLM",
    ModuleConfig.TASK: "trainer.tasks.task:Trained",
}
"""Name of a task to the place of the class of the models that its runs leave."""


def open_trained(use: Use | Exporting, verb: str) -> Any:
    """Find the trained model of a run, which must support the verb; nothing is loaded yet."""
    config = run_config(Path(use.run))
    found = part(TRAINED[config.TASK])(Path(use.run), config)
    if not hasattr(found, verb):
        by = config.COMMAND or "halfstep.Trainer"
        raise ConfigError(
            f"{use.run} is a run of {by}, for which there is no {verb} (halfstep {verb} --help)"
        )
    return found


def run(arguments: Predicting | Generating | Evaluating | Exporting) -> int:
    """Use a trained model in the way that the command says."""
    match arguments:
        case Predicting():
            _predict(arguments)
        case Generating():
            print(open_trained(arguments, "generate").generate(arguments))
        case Evaluating():
            _evaluate(arguments)
        case Exporting():
            print(open_trained(arguments, "export").export(arguments))
    return 0


def _evaluate(arguments: Evaluating) -> None:
    trained = open_trained(arguments, "evaluate")
    text, values = trained.evaluate(arguments)
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(values, ensure_ascii=False) if arguments.json else text)


def _predict(arguments: Predicting) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # JSON lines are UTF-8, whatever the terminal uses
        sys.stdout.reconfigure(encoding="utf-8")
    source = sys.stdin.buffer if arguments.input == "-" else Path(arguments.input)
    texts = read_texts(source, arguments.text_column)
    trained = open_trained(arguments, "predict")
    found = trained.open(arguments).predict(texts, arguments.batch_size)
    if arguments.output in ("-", "/dev/stdout"):
        _write(found, sys.stdout)
    else:
        rows = [*found]  # before the file is opened, which may be the input
        with Path(arguments.output).open("w", encoding="utf-8") as file:
            _write(rows, file)
        print(f"Labels of {len(rows):,} texts written: {arguments.output}")
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)


def _write(found: Iterable[tuple[str, str, float]], file: TextIO) -> None:
    for text, label, probability in found:
        line = {"text": text, "label": label, "probability": probability}
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
