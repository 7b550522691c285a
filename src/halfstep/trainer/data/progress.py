"""How long-running work reports its progress: by a plain function, called with three values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""``progress(what, done_bytes, total_bytes)``; ``what`` is one of the phases below."""

HASH = "hash"
"""Reading the input files to find their content hash; every call does this."""
CHECK = "check"
"""Verifying token files: the cached ones by their SHA-256, ``.bin`` files id by id."""
TRAIN_TOKENIZER = "train tokenizer"
"""Feeding the corpus to the BPE trainer; the merges that follow the last byte report nothing."""
ENCODE = "encode"
"""Turning text into token files."""


def no_progress(what: str, done: int, total: int) -> None:
    """Reports nothing; the default."""
