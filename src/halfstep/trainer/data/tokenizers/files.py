"""Tokenizers are loaded from local files only; nothing is fetched from the network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as Engine, models

from halfstep.errors import DataError
from halfstep.trainer.data.tokenizers.tokenizer import (
    BYTES,
    BYTES_MARK,
    CONFIG_FILE,
    END_OF_TEXT,
    TOKENIZER_FILE,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    byte_level,
)

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
"""The two files of GPT-2's own format."""

KNOWN_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Tried in this order where no config file names one: GPT-2, Llama 3, T5 and Llama 2, Gemma."""

ACCEPTED = (
    f"give bytes, bpe:N, a {TOKENIZER_FILE}, or a local folder with {TOKENIZER_FILE} "
    f"or {VOCAB_FILE} and {MERGES_FILE} (halfstep downloads none)"
)

T = TypeVar("T")


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Loads a tokenizer from a ``tokenizer.json`` or from a Hugging Face or GPT-2 folder.

    The end-of-text token is ``eos_token`` of a ``tokenizer_config.json`` that lies beside, else the
    first of ``KNOWN_END_OF_TEXT`` in the vocabulary, else there is none.

    Args:
        path: The file or the folder; ``~`` is the home folder.

    Returns:
        The tokenizer; one that ``Tokenizer.save`` wrote comes back with the same fingerprint.

    Raises:
        DataError: Nothing is there, or what is there cannot be used.
    """
    path = Path(path).expanduser()
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.exists(path):
        raise DataError(f"tokenizer {path}: no such file or folder; {ACCEPTED}")
    config = _config(folder / CONFIG_FILE)
    if config.get(BYTES_MARK) == BYTES:
        return ByteTokenizer()
    engine = _engine(path)
    try:
        return LibraryTokenizer(engine, _end_of_text(engine, config))
    except DataError as error:
        raise DataError(f"tokenizer {path}: {error}") from None


def _engine(path: Path) -> Engine:
    if os.path.isfile(path):
        return _loaded(path, lambda: Engine.from_str(path.read_text(encoding="utf-8")))
    if os.path.isfile(path / TOKENIZER_FILE):
        return _engine(path / TOKENIZER_FILE)
    vocab, merges = path / VOCAB_FILE, path / MERGES_FILE
    if os.path.isfile(vocab) and os.path.isfile(merges):
        return _loaded(path, lambda: byte_level(models.BPE.from_file(str(vocab), str(merges))))
    raise DataError(f"tokenizer {path}: no tokenizer in this folder; {ACCEPTED}")


def _loaded(path: Path, load: Callable[[], T]) -> T:
    try:
        return load()
    except OSError as error:
        raise DataError(f"tokenizer {path}: cannot be read: {error.strerror or error}") from None
    # The library raises bare Exception for whatever is wrong with a file.
    except Exception as error:
        raise DataError(f"tokenizer {path}: not a usable tokenizer ({error}); {ACCEPTED}") from None


def _config(path: Path) -> dict[str, object]:
    if not os.path.exists(path):
        return {}
    config = _loaded(path, lambda: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(config, dict):
        raise DataError(f"tokenizer {path}: must hold a JSON object, got {type(config).__name__}")
    return config


def _end_of_text(engine: Engine, config: dict[str, object]) -> str | None:
    named = config.get("eos_token")
    if isinstance(named, dict):  # the older way: an AddedToken written out
        named = named.get("content")
    candidates = (named,) if isinstance(named, str) else KNOWN_END_OF_TEXT
    return next((name for name in candidates if engine.token_to_id(name) is not None), None)
