"""The commands ``halfstep data alpaca-sample`` and ``halfstep data emotions-sample``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfstep.cli.commands import AlpacaSample, EmotionsSample
from halfstep.errors import ConfigError
from halfstep.trainer.data.emotions import emotions
from halfstep.trainer.data.samples import instructions


def run(arguments: AlpacaSample | EmotionsSample) -> int:
    """Write a sample, and print what it is and the command that trains on it."""
    if isinstance(arguments, AlpacaSample):
        out = Path(arguments.out or "alpaca.jsonl")
        _write(out, _lines(instructions(arguments.count)))
        print(f"{out}: {arguments.count} questions about Python's standard library")
        print(f"next: halfstep finetune lm --train {out} --model FOLDER")
        return 0
    names, posts = emotions(arguments.count, arguments.seed)
    if arguments.format == "records":
        out = Path(arguments.out or "emotions.jsonl")
        _write(out, _lines({"text": post.text, "label": post.label} for post in posts))
        more = ""
    else:
        out = Path(arguments.out or "emotions.json")
        table = out.with_suffix(".labels.json")
        _absent(table)
        pairs = (json.dumps([p.words, names.index(p.label)], ensure_ascii=False) for p in posts)
        _write(out, "[" + ",\n".join(pairs) + "]\n")
        _write(table, json.dumps({n: i for i, n in enumerate(names)}, ensure_ascii=False) + "\n")
        more = f" --labels-file {table} --join-words"
    print(f"{out}: {arguments.count} synthetic posts of {len(names)} emotions: {' '.join(names)}")
    print(f"next: halfstep finetune classify --train {out}{more}")
    return 0


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _absent(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another --out")


def _write(path: Path, text: str) -> None:
    _absent(path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
