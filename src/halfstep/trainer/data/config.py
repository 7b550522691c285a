"""The data section of each task's configuration, checked without reading any data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from halfstep.errors import ConfigError
from halfstep.option import Range, option

Part: TypeAlias = Annotated[float, Range("0 < x < 1", lambda x: 0 < x < 1)]
MIN_BPE_IDS = 257
"""Smallest byte-level BPE vocabulary: the 256 bytes and the end-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data section of a run: where text comes from and how it becomes tokens."""

    train: tuple[str, ...] = option(
        (),
        "Files and folders, in this order; empty means the standard library of this Python.",
    )
    validation: tuple[str, ...] = option(
        (), "The same for validation; empty means the last validation_fraction of train."
    )
    tokenizer: str = option(
        "bpe:8192", "bytes, bpe:N (trained here on train), or a tokenizer.json or its folder."
    )
    validation_fraction: Part = option(
        0.1, "Share of the bytes held out, in (0, 1); unused with validation."
    )

    def __post_init__(self) -> None:
        _check(self, "validation")
        size = bpe_size(self.tokenizer)
        if self.tokenizer.startswith("bpe:") and (size is None or size < MIN_BPE_IDS):
            raise ConfigError(
                f"data.tokenizer must be bytes, bpe:N with N of at least {MIN_BPE_IDS} (256 bytes "
                f"and the end-of-text token), or a path, got {self.tokenizer!r}"
            )


def bpe_size(tokenizer: str) -> int | None:
    """Tells how many ids ``bpe:N`` asks for; None for ``bytes`` and for paths."""
    return int(tokenizer[4:]) if re.fullmatch(r"bpe:[0-9]{1,9}", tokenizer) else None


def _check(config: object, held_out: str) -> None:
    """Refuses paths that name nothing: an empty one would be this folder."""
    for field in ("train", held_out):
        if not all(path.strip() for path in getattr(config, field)):
            raise ConfigError(f"data.{field} holds an empty path; remove it or name a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledConfig:
    """The data section of text classification."""

    train: tuple[str, ...] = option(
        (),
        "Files (.csv .tsv .jsonl .json .parquet) or datasets:NAME[@SPLIT], in this order.",
    )
    dev: tuple[str, ...] = option(
        (), "The same for evaluation; empty means dev_fraction of train, of each class alike."
    )
    dev_fraction: Part = option(
        0.1, "Share of the training examples held out, in (0, 1); unused with dev."
    )
    text_column: str = option(
        "", "Name of the text's column, or A+B to join two; empty means: look for a usual name."
    )
    label_column: str = option("", "Name of the label's column; empty means the same.")
    drop_empty: bool = option(False, "Whether rows without a text or a label are left out.")
    labels: tuple[str, ...] = option(
        (),
        "Names of the classes in the order of their ids; empty means: find them in train. Labels "
        "in the data are then these names, or their ids from 0.",
    )

    def __post_init__(self) -> None:
        _check(self, "dev")
        if twice := [name for name in self.labels if self.labels.count(name) > 1]:
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

    names: tuple[str, ...]  # of the classes; a label is a place in here
    train: LabelledTexts
    dev: LabelledTexts
    sha256: str  # over names, texts and labels, whatever files they came from
    notes: tuple[str, ...]  # what a user should know though nothing is wrong


Template: TypeAlias = Literal["", "plain", "alpaca", "tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionsConfig:
    """The data section of a causal-LM fine-tuning: which records, and how they become rows."""

    train: tuple[str, ...] = option(
        (),
        "Files of records (.jsonl .json .csv .tsv .parquet) or texts (.txt), folders of them, or "
        "datasets:NAME[@SPLIT]. A record holds messages; or instruction, output and perhaps input; "
        "or prompt and completion; or text.",
    )
    dev: tuple[str, ...] = option(
        (), "The same for evaluation; empty means dev_fraction of the documents of train."
    )
    dev_fraction: Part = option(
        0.1, "Share of the documents held out, drawn with the seed, in (0, 1); unused with dev."
    )
    template: Template = option(
        "",
        "plain, alpaca, tokenizer (its own chat template); empty means the one of the records: "
        "alpaca for instructions, the tokenizer's for messages, else plain.",
    )
    max_length: Annotated[int, Range("integers >= 2", lambda x: x >= 2)] = option(
        1024,
        "Maximal number of tokens in a row. Longer records are cut at the right; plain "
        "text is cut into several documents.",
    )
    packing: bool = option(
        True, "Whether several documents share a row (without seeing each other) to save padding."
    )
    drop_empty: bool = option(False, "Whether records with an empty field are left out.")
    mask_prompt: bool = option(True, "Whether only answers are learned; otherwise prompts too.")

    def __post_init__(self) -> None:
        _check(self, "dev")
