"""The command ``halfstep predict``."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from halfstep.errors import ConfigError, HalfstepError
from halfstep.trainer.config.tasks import ClassifyConfig
from halfstep.trainer.config.use import Predicting
from halfstep.trainer.data.labelled import read_texts
from halfstep.trainer.memory import require_rows
from halfstep.trainer.tasks.trained import open_trained


def run(arguments: Predicting) -> int:
    """Write the label and probability of every text as JSON lines."""
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size}; allowed: integers >= 1")
    require_rows(arguments.batch_size, "--batch-size")
    for stream in (sys.stdin, sys.stdout):  # JSON lines are UTF-8, whatever the terminal uses
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    source: Path | TextIO = sys.stdin if arguments.input == "-" else Path(arguments.input)
    texts = read_texts(source, arguments.text_column)
    trained = open_trained(arguments, ClassifyConfig.TASK)
    found = trained.predict(arguments, texts)
    if arguments.output == "-" or _is_stdout(arguments.output):
        _write(found, sys.stdout)
    else:
        count = _write_file(found, Path(arguments.output))
        print(f"Labels of {count:,} texts written: {arguments.output}")
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _is_stdout(output: str) -> bool:
    """Whether a name, such as ``/dev/stdout``, is what this process's standard output goes to."""
    try:
        return os.path.samestat(os.stat(output), os.fstat(1))
    except OSError:  # it does not exist yet, or standard output is closed
        return False


def _write_file(found: Iterable[tuple[str, str, float]], path: Path) -> int:
    """Write a file atomically, or write into a device or a pipe; return the number of lines."""
    # a device or pipe must not be replaced, nor resolved: a pipe that /dev/fd names has no path
    special = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
    if not special:
        path = Path(os.path.realpath(path))  # keeps a link
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        with (path if special else temporary).open("w", encoding="utf-8") as file:
            count = _write(found, file)
        if not special:
            os.replace(temporary, path)
    except OSError as error:
        raise HalfstepError(f"--output {path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _write(found: Iterable[tuple[str, str, float]], file: TextIO) -> int:
    count = 0
    for text, label, probability in found:
        line = {"text": text, "label": label, "probability": probability}
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        count += 1
    return count
