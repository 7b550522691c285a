"""The data section of each task's configuration, checked without reading any data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfstep.errors import ConfigError
from halfstep.option import option

MIN_BPE_IDS = 257
"""Smallest byte-level BPE vocabulary: the 256 bytes and the end-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data section of a run: where text comes from and how it becomes tokens."""

    train: tuple[str, ...] = option(
        (),
        "Files, globs and folders, in this order; empty means the standard library of this Python.",
    )
    validation: tuple[str, ...] = option(
        (), "The same for validation; empty means the last validation_fraction of train."
    )
    tokenizer: str = option(
        "bpe:8192", "bytes, bpe:N (trained here on train), or a tokenizer.json or its folder."
    )
    validation_fraction: float = option(
        0.1, "Share of the bytes (tokens for .bin) held out, in (0, 1); unused with validation."
    )
    cache_dir: str = option(
        "", "Empty means $HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else ~/.cache/halfstep."
    )

    def __post_init__(self) -> None:
        check_paths("train", self.train)
        check_paths("validation", self.validation)
        hint = "validate on other text give data.validation"
        check_fraction("validation_fraction", self.validation_fraction, hint)
        if not self.tokenizer.strip():
            raise ConfigError(
                "data.tokenizer is empty; give bytes, bpe:N or the path of a tokenizer"
            )
        size = bpe_size(self.tokenizer)
        if self.tokenizer.startswith("bpe:") and (size is None or size < MIN_BPE_IDS):
            raise ConfigError(
                f"data.tokenizer must be bytes, bpe:N with N of at least {MIN_BPE_IDS} (256 bytes "
                f"and the end-of-text token), or a path, got {self.tokenizer!r}"
            )


def bpe_size(tokenizer: str) -> int | None:
    """Tells how many ids ``bpe:N`` asks for; None for ``bytes`` and for paths."""
    return int(tokenizer[4:]) if re.fullmatch(r"bpe:[0-9]{1,9}", tokenizer) else None


# Checks that the data sections of all tasks share. Types are checked where files and options are
# read (``trainer/config/read.py``), ranges here.


def check_paths(field: str, paths: tuple[str, ...]) -> None:
    """Refuses paths that name nothing."""
    for path in paths:
        if "\0" in path or not path.strip():
            raise ConfigError(f"data.{field} holds the path {path!r}; remove it or name a file")


def check_fraction(field: str, value: float, instead: str) -> None:
    """Refuses a share outside (0, 1)."""
    if not 0 < value < 1:
        raise ConfigError(
            f"data.{field} must be a number between 0 and 1 (both excluded), got {value!r}; to "
            f"{instead}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledConfig:
    """The data section of text classification."""

    train: tuple[str, ...] = option(
        (),
        "Files (.csv .tsv .jsonl .json .parquet) or datasets:NAME[/CONFIG][@SPLIT], in this "
        "order. May be empty as long as nothing is read: read_labelled needs at least one.",
    )
    dev: tuple[str, ...] = option(
        (), "The same for evaluation; empty means dev_fraction of train, of each class alike."
    )
    dev_fraction: float = option(
        0.1, "Share of the training examples held out, in (0, 1); unused with dev."
    )
    text_column: str = option("", "Name of the text's column; empty means: look for a usual name.")
    label_column: str = option("", "The same for the label.")
    labels: tuple[str, ...] = option(
        (),
        "Names of the classes in the order of their ids; empty means: find them in train. Labels "
        "in the data are then these names, or their ids from 0.",
    )
    labels_file: str = option(
        "",
        "The same from a file: one name a line; or a .json file with a list, or with a table "
        '{"name": id, ...}.',
    )
    join_words: bool = option(
        False,
        "Remove blanks between Chinese (or Japanese) characters, as texts that were cut into "
        "words have; blanks beside other letters stay.",
    )
    limit: int = option(0, "Use the first N examples of train only; 0 means all.")
    drop_empty: bool = option(
        False, "Leave out, and count, texts that are empty or blank instead of refusing them."
    )

    def __post_init__(self) -> None:
        for field in ("train", "dev"):
            check_paths(field, getattr(self, field))
        check_fraction("dev_fraction", self.dev_fraction, "evaluate on other texts give data.dev")
        text, label, labels = self.text_column, self.label_column, self.labels
        if text and text == label:
            raise ConfigError(f"data.text_column and data.label_column are both {text!r}; give two")
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


Format: TypeAlias = Literal["auto", "alpaca", "chat", "text", "prompt-completion"]
Template: TypeAlias = Literal["", "plain", "alpaca", "vicuna", "tokenizer"]
DropLong: TypeAlias = Literal["truncate", "drop", "refuse"]

AUTO, ALPACA, CHAT, TEXT, COMPLETION = "auto", "alpaca", "chat", "text", "prompt-completion"
PLAIN, VICUNA, TOKENIZER = "plain", "vicuna", "tokenizer"
DROP, REFUSE = "drop", "refuse"
TEMPLATES_OF = {
    ALPACA: (ALPACA, VICUNA, TOKENIZER),
    COMPLETION: (PLAIN, ALPACA, VICUNA, TOKENIZER),
    CHAT: (TOKENIZER, VICUNA),
    TEXT: (PLAIN,),
}
"""Templates that can write each format; the first is the one that "" stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionsConfig:
    """The data section of a causal-LM fine-tuning: which records, and how they become rows."""

    train: tuple[str, ...] = option(
        (),
        "Files of records (.jsonl .json .csv .tsv .parquet) or texts (.txt), globs and folders of "
        "them, or datasets:NAME[/CONFIG][@SPLIT].",
    )
    dev: tuple[str, ...] = option(
        (), "The same for evaluation; empty means dev_fraction of the documents of train."
    )
    dev_fraction: float = option(
        0.1, "Share of the documents held out, drawn with the seed, in (0, 1); unused with dev."
    )
    format: Format = option(
        "auto", "alpaca, chat, text or prompt-completion; auto goes by the fields."
    )
    template: Template = option(
        "",
        "plain, alpaca, vicuna, tokenizer (its own chat template); empty means the one of the "
        "format: alpaca for alpaca, plain for prompt-completion and text, and for chat the "
        "tokenizer's own, or vicuna where the tokenizer has none.",
    )
    max_length: int = option(1024, "Maximal number of tokens in a row, at least 2.")
    packing: bool = option(
        True, "Whether several documents share a row (without seeing each other) to save padding."
    )
    mask_prompt: bool = option(True, "Whether only answers are learned; otherwise prompts too.")
    drop_long: DropLong = option(
        "truncate",
        "What becomes of longer documents: truncate (cut at the right; plain text is cut into "
        "several documents instead), drop or refuse.",
    )

    def __post_init__(self) -> None:
        for field in ("train", "dev"):
            check_paths(field, getattr(self, field))
        check_fraction("dev_fraction", self.dev_fraction, "evaluate on other records give data.dev")
        if self.max_length < 2:
            raise ConfigError(
                f"data.max_length must be a whole number of at least 2 (a token and the one after "
                f"it), got {self.max_length!r}"
            )
        if self.format != AUTO:
            check_template(self.format, self.template)


def check_template(format: str, template: str) -> None:
    """Refuses a template that cannot write a format: Alpaca's words have no place for a chat."""
    if template and template not in TEMPLATES_OF[format]:
        raise ConfigError(
            f"data.template {template} cannot write records of the format {format}; use "
            f"{' or '.join(TEMPLATES_OF[format])}, or leave it empty"
        )
