"""The configuration of text data, checked as far as possible without reading any."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfstep.errors import ConfigError

MIN_BPE_IDS = 257
"""Smallest byte-level BPE vocabulary: the 256 bytes and the end-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data section of a run: where text comes from and how it becomes tokens."""

    train: tuple[str, ...] = ()
    """Files, globs and folders, in this order; empty means the standard library of this Python."""
    validation: tuple[str, ...] = ()
    """The same for validation; empty means the last ``validation_fraction`` of ``train``."""
    tokenizer: str = "bpe:8192"
    """``bytes``, ``bpe:N`` (trained here on ``train``), or a tokenizer.json or its folder."""
    validation_fraction: float = 0.1
    """Share of the bytes (tokens for ``.bin``) held out, in (0, 1); unused with ``validation``."""
    cache_dir: str = ""
    """Empty means $HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else ~/.cache/halfstep."""

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
