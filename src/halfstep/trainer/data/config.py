"""What a user can ask of the data room, checked as far as that is possible without reading it."""

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
        _check_paths("train", self.train)
        _check_paths("validation", self.validation)
        _check_tokenizer(self.tokenizer)
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, float) or not 0 < fraction < 1:
            raise ConfigError(
                f"data.validation_fraction must be a number between 0 and 1 (both excluded), "
                f"got {fraction!r}; to validate on other text give data.validation"
            )
        _check_string("cache_dir", self.cache_dir)


def bpe_size(tokenizer: str) -> int | None:
    """Tells how many ids ``bpe:N`` asks for; None for every other tokenizer.

    Args:
        tokenizer: A value of ``DataConfig.tokenizer``, already checked.

    Returns:
        N, or None for ``bytes`` and for paths.
    """
    return int(tokenizer[4:]) if re.fullmatch(r"bpe:[0-9]{1,9}", tokenizer) else None


def _check_string(field: str, value: object) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"data.{field} must be a string without NUL characters, got {value!r}")


def _check_paths(field: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(f"data.{field} must be a list of paths, got {value!r}")
    for path in value:
        _check_string(field, path)
        if not path.strip():
            raise ConfigError(f"data.{field} holds an empty path; remove it or name a file")


def _check_tokenizer(value: object) -> None:
    _check_string("tokenizer", value)
    text = str(value)
    if not text.strip():
        raise ConfigError("data.tokenizer is empty; give bytes, bpe:N or the path of a tokenizer")
    if text.startswith("bpe:"):
        size = bpe_size(text)
        if size is None or size < MIN_BPE_IDS:
            raise ConfigError(
                f"data.tokenizer must be bytes, bpe:N with N of at least {MIN_BPE_IDS} (256 bytes "
                f"and the end-of-text token), or a path, got {text!r}"
            )
