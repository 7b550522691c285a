"""The data section of each task's configuration, checked without reading any data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from halfstep.option import Range, option

Part: TypeAlias = Annotated[float, Range("0 < x < 1", lambda x: 0 < x < 1)]


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
    text_column: str = option("", "Name of the text's column; empty means: look for a usual name.")
    label_column: str = option("", "Name of the label's column; empty means the same.")
    labels: tuple[str, ...] = option(
        (),
        "Names of the classes in the order of their ids; empty means: find them in train. Labels "
        "in the data are then these names, or their ids from 0.",
    )


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
    max_length: Annotated[int, Range("integers >= 2", lambda x: x >= 2)] = option(
        1024,
        "Maximal number of tokens in a row. Longer records are cut at the right; plain "
        "text is cut into several documents.",
    )
