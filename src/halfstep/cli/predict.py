"""``halfstep predict``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from halfstep.data.unlabelled import read_texts
from halfstep.errors import ConfigError, HalfstepError
from halfstep.training.environment import choose_device
from halfstep.training.finetune_config import ClassifyConfig
from halfstep.training.predict import Predictor
from halfstep.training.run_folder import run_config


def run(arguments: argparse.Namespace) -> int:
    """Write label and probability of every text."""
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size}; allowed: integers >= 1")
    folder, precision = _source(arguments)
    predictor = Predictor(folder, precision, choose_device(arguments.device))
    source: Path | TextIO = sys.stdin if arguments.input == "-" else Path(arguments.input)
    texts = (text for _, text in read_texts(source, arguments.text_column))
    if arguments.output == "-":
        _write(predictor, texts, arguments.batch_size, sys.stdout)
        return 0
    path = Path(arguments.output)
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            _write(predictor, texts, arguments.batch_size, file)
        os.replace(temporary, path)
    except OSError as error:
        raise HalfstepError(f"--output {path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return 0


def _source(arguments: argparse.Namespace) -> tuple[Path, str]:
    """The model's folder, and the precision to predict in."""
    if arguments.run is None:
        return Path(arguments.model), arguments.precision or "fp32"
    path = Path(arguments.run)
    config = run_config(path)
    if not isinstance(config, ClassifyConfig):
        raise ConfigError(f"--run {path} is a run of the task {config.TASK}, not of a classifier")
    folder = path / "model"
    if not folder.is_dir():
        raise ConfigError(
            f"--run {path} has no model yet: it is written when the run ends; go on with it by "
            f"halfstep finetune classify --resume --output-dir {path}"
        )
    return folder, arguments.precision or config.precision


def _write(predictor: Predictor, texts: Iterable[str], batch_size: int, file: TextIO) -> None:
    for text, label, probability in predictor.predict(texts, batch_size):
        found = {"text": text, "label": label, "probability": probability}
        file.write(json.dumps(found, ensure_ascii=False) + "\n")
