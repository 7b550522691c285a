"""One input of labelled texts becomes two lists, every text and label checked where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.columns import fields, wanted_label, wanted_text
from halfstep.trainer.data.labelled.config import HUB_PREFIX, LabelledConfig, column_number
from halfstep.trainer.data.labelled.hub_datasets import read_dataset
from halfstep.trainer.data.records import (
    TABLE_SEPARATORS,
    Records,
    read_json,
    read_jsonl,
    read_table,
)

SUFFIXES = (*TABLE_SEPARATORS, ".jsonl", ".json")


@dataclass(slots=True)
class NamedTexts:
    """Texts with the names of their labels, of one or several inputs."""

    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    """Where each label stands for the first time, as messages word it."""
    dropped: int = 0
    """Empty texts that were left out."""


def read_named(inputs: tuple[str, ...], config: LabelledConfig, role: str) -> NamedTexts:
    """Reads all inputs of one role in order.

    Args:
        inputs: ``config.train``, ``config.dev``, or others like them.
        config: Which columns to take, and whether to drop empty texts.
        role: ``train``, ``dev`` or ``test``, for messages and for the usual split of a dataset.

    Returns:
        At least one text; strings that are UTF-8 and not blank.

    Raises:
        DataError: An input cannot be read, or a text or a label in it cannot be used; the message
            names the place.
    """
    found = NamedTexts()
    for given in inputs:
        _read_one(_open(given, config, role), config, found)
    if not found.texts:
        dropped = f" (all {found.dropped} are empty)" if found.dropped else ""
        raise DataError(f"{role}: no texts in {', '.join(inputs)}{dropped}; add some")
    return found


def label_name(value: Any) -> str:
    """Turns a label into a name: strings as they are, 3 into "3", true into "true".

    Raises:
        ValueError: It is no string, integer or boolean, or an empty or broken string; the message
            says which.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the label is empty; give every text a label")
        if not is_text(value):
            raise ValueError("the label holds half a surrogate pair (\\ud800 to \\udfff); mend it")
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    kind = "null" if value is None else type(value).__name__
    raise ValueError(f"the label must be a string, an integer or a boolean, got {kind}")


def _open(given: str, config: LabelledConfig, role: str) -> Records:
    if given.startswith(HUB_PREFIX):
        return read_dataset(given, role)
    path = Path(given).expanduser()
    suffix = path.suffix.lower()
    if suffix in TABLE_SEPARATORS:
        columns = (config.text_column, config.label_column)
        return read_table(path, header=all(column_number(column) is None for column in columns))
    if suffix == ".jsonl":
        return read_jsonl(path)
    if suffix == ".json":
        return read_json(path)
    hint = f" or {HUB_PREFIX}FOLDER" if path.is_dir() or suffix in (".parquet", ".arrow") else ""
    raise DataError(
        f"{given}: labelled texts are read from {', '.join(SUFFIXES)} files{hint}, not from "
        f"{suffix or 'names without suffix'}; convert or rename it"
    )


def _read_one(records: Records, config: LabelledConfig, found: NamedTexts) -> None:
    wanted = (wanted_text(config.text_column), wanted_label(config.label_column))
    known: dict[Any, str] = {}
    first_empty, empty = 0, 0
    texts, labels = found.texts, found.labels
    for number, (text, value) in fields(records, wanted):
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise DataError(f"{records.at(number)}: the text must be a string, got {kind}")
        # 1 and True are one key of a dict, so only strings are looked up.
        label = known.get(value) if type(value) is str else None
        if label is None:
            try:
                label = label_name(value)
            except ValueError as error:
                raise DataError(f"{records.at(number)}: {error}") from None
            label = known.setdefault(label, label)  # one object for all texts of a class
        if not text or text.isspace():
            first_empty, empty = first_empty or number, empty + 1
            continue
        if not is_text(text):
            raise DataError(
                f"{records.at(number)}: the text holds half a surrogate pair (\\ud800 to \\udfff); "
                f"remove it"
            )
        if label not in found.first:
            found.first[label] = records.at(number)
        texts.append(text)
        labels.append(label)
    if empty and not config.drop_empty:
        raise DataError(
            f"{records.at(first_empty)}: the text is empty, and so are {empty} in all in this "
            f"input; remove them, or leave them out with --data.drop_empty true (evaluate: "
            f"--drop-empty)"
        )
    found.dropped += empty


def is_text(string: str) -> bool:
    """Whether a string can be written as UTF-8: it holds no half of a surrogate pair."""
    try:
        string.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
