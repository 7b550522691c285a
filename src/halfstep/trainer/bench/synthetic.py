"""Data for a measurement whose user gives none: random, but with something to learn in it.

Each symbol has 16 possible followers, drawn once; frequent symbols are in the lists of many. A
model learns first which symbols are frequent, within a few steps, and then what follows what.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import ClassifyConfig, LMConfig, TrainConfig
from halfstep.trainer.data.config import bpe_size
from halfstep.trainer.data.labelled.config import LabelledConfig
from halfstep.trainer.data.tokenizer import load_tokenizer

Symbols = npt.NDArray[np.int64]
Config = TypeVar("Config", bound=BaseConfig)

_FOLLOWERS = 16
_CHAINS = 256
_TOKENS = 1 << 20
"""Tokens for training on text; so many windows start in them that none comes twice."""
_SYLLABLES = [a + b for a, b in itertools.product("bdfgklmnprst", "aeiou")]
WORDS = tuple(a + b for a, b in itertools.product(_SYLLABLES[:16], _SYLLABLES))
"""Words for texts; every tokenizer of Latin letters has ids for them."""


def with_data(config: Config, folder: Path) -> Config:
    """Give a configuration without training data synthetic data; return others as they are.

    Args:
        config: Of any task; its batch size and lengths determine how much is written.
        folder: An existing folder for the data.

    Raises:
        DataError: If the tokenizer that it names cannot be loaded.
    """
    match config:
        case TrainConfig(data=data) if not data.train:
            rows = max(_TOKENS, 40 * config.block_size)
            found: BaseConfig = _tokens(config, folder, rows)
        case LMConfig(data=texts) if not texts.train:
            path = folder / "texts.jsonl"
            length = texts.max_length // 2
            _write(path, ({"text": t} for t in _texts(16 * config.run.batch_size, length)))
            texts = dataclasses.replace(
                texts, train=(str(path),), dev=(), format="text", template=""
            )
            found = dataclasses.replace(config, data=texts)
        case ClassifyConfig(data=labelled) if not labelled.train:
            path = folder / "labelled.jsonl"
            count, length = 8 * config.run.batch_size, config.model.max_length // 2
            both = zip(_texts(count, length), _texts(count, length, first=512), strict=True)
            # every fifth pair has each other's labels, so that no model can be sure
            named = zip(both, itertools.cycle(["ab"] * 4 + ["ba"]))
            every = ((t, label) for pair, ab in named for t, label in zip(pair, ab, strict=True))
            _write(path, ({"text": text, "label": label} for text, label in every))
            found = dataclasses.replace(config, data=LabelledConfig(train=(str(path),)))
        case _:
            return config
    assert isinstance(found, type(config))
    return found


def _tokens(config: TrainConfig, folder: Path, count: int) -> TrainConfig:
    """Write a file of tokens, and a tokenizer with as many ids as the configuration asks for."""
    named, size = config.data.tokenizer, bpe_size(config.data.tokenizer)
    if size is not None:
        named = str(folder / "tokenizer.json")
        ids = {f"t{number}": number for number in range(size)}
        Tokenizer(models.WordLevel(ids, unk_token="t0")).save(named)
    size = 256 if named == "bytes" else size or load_tokenizer(named).vocab_size
    path = folder / "tokens.bin"
    length = -(-count // _CHAINS)
    chain(min(size, 1 << 16), _CHAINS, length).astype("<u2").tofile(path)
    data = dataclasses.replace(
        config.data, train=(str(path),), validation=(), tokenizer=named, cache_dir=str(folder)
    )
    return dataclasses.replace(config, data=data)


def _texts(count: int, length: int, first: int = 0) -> Iterator[str]:
    """Yield texts of ``length / 4`` to ``length`` words, at least one, about WORDS[first:]."""
    words = WORDS[first : first + 512]
    rows = chain(len(words), count, max(4, length))
    lengths = np.random.default_rng(2).integers(max(1, length // 4), max(4, length), count)
    for row, taken in zip(rows, lengths, strict=True):
        yield " ".join(words[number] for number in row[:taken])


def chain(symbols: int, rows: int, length: int) -> Symbols:
    """Draw rows of symbols, each of which depends on the one before.

    Args:
        symbols: How many there are; small numbers are the frequent ones.
        rows: Rows to draw.
        length: Symbols in a row.

    Returns:
        int64 (rows, length), the same in every call.
    """
    generator = np.random.default_rng(1)
    # the fourth power makes a few symbols frequent: half of all draws are among the first 1/16
    skewed = generator.random((symbols, _FOLLOWERS)) ** 4
    followers = (skewed * symbols).astype(np.int64)
    now = generator.integers(symbols, size=rows)
    columns = [now]
    for draw in generator.integers(_FOLLOWERS, size=(length - 1, rows)):
        now = followers[now, draw]
        columns.append(now)
    return np.stack(columns, 1)


def _write(path: Path, records: Iterator[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
