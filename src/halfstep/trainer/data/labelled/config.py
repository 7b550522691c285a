"""The configuration of labelled texts, and the classes of the data that are read by it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfstep.errors import ConfigError
from halfstep.trainer.data.config import check_fraction, check_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledConfig:
    """The data section of text classification."""

    train: tuple[str, ...] = ()
    """Files (.csv .tsv .jsonl .json .parquet) or ``datasets:NAME[/CONFIG][@SPLIT]``, in this order.
    May be empty as long as nothing is read: ``read_labelled`` needs at least one."""
    dev: tuple[str, ...] = ()
    """The same for evaluation; empty means ``dev_fraction`` of ``train``, of each class alike."""
    dev_fraction: float = 0.1
    """Share of the training examples held out, in (0, 1); unused with ``dev``."""
    text_column: str = ""
    """Name of the text's column, or its number, from 1, in a table without header."""
    label_column: str = ""
    """The same for the label; empty means: look for a usual name."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of their ids; empty means: find them in ``train``. Labels
    in the data are then these names, or their ids from 0."""
    labels_file: str = ""
    """The same from a file: one name a line; or a ``.json`` file with a list, or with a table
    {"name": id, ...}."""
    join_words: bool = False
    """Remove blanks between Chinese (or Japanese) characters, as texts that were cut into words
    have; blanks beside other letters stay."""
    limit: int = 0
    """Use the first N examples of ``train`` only; 0 means all."""
    drop_empty: bool = False
    """Leave out, and count, texts that are empty or blank instead of refusing them."""

    def __post_init__(self) -> None:
        for field in ("train", "dev"):
            check_paths(field, getattr(self, field))
        check_fraction("dev_fraction", self.dev_fraction, "evaluate on other texts give data.dev")
        text, label, labels = self.text_column, self.label_column, self.labels
        check_column("text_column", text)
        check_column("label_column", label)
        if text and text == label:
            raise ConfigError(f"data.text_column and data.label_column are both {text!r}; give two")
        if text and label and (column_number(text) is None) != (column_number(label) is None):
            raise ConfigError(
                f"data.text_column={text!r} and data.label_column={label!r}: give two names, or "
                f"two numbers for a table without header"
            )
        if labels and self.labels_file:
            raise ConfigError("data.labels and data.labels_file are both given; keep one of them")
        if self.limit < 0:
            raise ConfigError(f"data.limit={self.limit}; allowed: integers >= 0")
        if len(labels) == 1 and "," in labels[0]:
            names = " ".join(labels[0].replace(",", " ").split())
            raise ConfigError(f"data.labels is one name, {labels[0]!r}; write --labels {names}")
        if blank := [name for name in labels if not name.strip()]:
            raise ConfigError(f"data.labels holds an empty name {blank[0]!r}; remove it")
        if twice := [name for name in labels if labels.count(name) > 1]:
            raise ConfigError(f"data.labels holds {twice[0]!r} twice; remove one")


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts and the numbers of their classes, side by side."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Everything a classifier is trained and evaluated on."""

    names: tuple[str, ...]
    """Names of the classes; a label is a place in here."""
    train: LabelledTexts
    dev: LabelledTexts
    sha256: str
    """64 hexadecimal digits over names, texts and labels, whatever files they came from."""
    notes: tuple[str, ...]
    """What a user should know of the data though nothing is wrong: one sentence each."""


def column_number(column: str) -> int | None:
    """Reads a column that is given by its number, counted from 1; None for a name."""
    return int(column) if re.fullmatch(r"[0-9]{1,6}", column) else None


def check_column(field: str, column: str) -> None:
    """Refuses column 0, which no table has."""
    if column_number(column) == 0:
        raise ConfigError(f"data.{field} is 0; columns are counted from 1, as in cut and awk")
