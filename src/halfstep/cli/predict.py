"""``halfstep predict``."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from halfstep.cli.classify_run import cut_note, open_run
from halfstep.errors import ConfigError, HalfstepError
from halfstep.trainer.config.finetune import ClassifyConfig
from halfstep.trainer.data.labelled.unlabelled import read_texts
from halfstep.trainer.environment import choose_device
from halfstep.trainer.memory import require_rows
from halfstep.trainer.run.folder import run_config
from halfstep.trainer.tasks.predict import Predictor


def run(arguments: argparse.Namespace) -> int:
    """Write label and probability of every text."""
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size}; allowed: integers >= 1")
    require_rows(arguments.batch_size, "--batch-size")
    predictor = _open(arguments)
    for stream in (sys.stdin, sys.stdout):  # JSON lines are UTF-8, whatever the terminal's is
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    source: Path | TextIO = sys.stdin if arguments.input == "-" else Path(arguments.input)
    texts = (text for _, text in read_texts(source, arguments.text_column))
    if arguments.output == "-":
        _write(predictor, texts, arguments.batch_size, sys.stdout)
        return 0
    path = Path(os.path.realpath(arguments.output))  # a link stays a link
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if path.exists() and not path.is_file():  # a device or a pipe, which must stay what it is
            with path.open("w", encoding="utf-8") as file:
                _write(predictor, texts, arguments.batch_size, file)
            return 0
        with temporary.open("w", encoding="utf-8") as file:
            _write(predictor, texts, arguments.batch_size, file)
        os.replace(temporary, path)
    except OSError as error:
        raise HalfstepError(f"--output {path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return 0


def _open(arguments: argparse.Namespace) -> Predictor:
    if arguments.run is None:
        return Predictor(
            Path(arguments.model),
            arguments.precision or "fp32",
            choose_device(arguments.device),
            trust_remote_code=arguments.trust_remote_code,
        )
    config = run_config(Path(arguments.run))
    if not isinstance(config, ClassifyConfig):
        raise ConfigError(
            f"--run {arguments.run} is a run of the task {config.TASK}, not of a classifier"
        )
    return open_run(arguments, config)


def _write(predictor: Predictor, texts: Iterable[str], batch_size: int, file: TextIO) -> None:
    for text, label, probability in predictor.predict(texts, batch_size):
        found = {"text": text, "label": label, "probability": probability}
        file.write(json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n")
    if predictor.tokenizer.truncated:
        print(f"note: {cut_note(predictor)}", file=sys.stderr)
