"""Opens Hugging Face tokenizers, from a folder or the hub, for classifiers and language models."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep.files import require_intact
from halfstep.trainer.models.pretrained import (
    Pretrained,
    first_line,
    quiet,
    require_library,
    resolve_source,
)

_NO_LIMIT = 10**9
"""Lengths from here on mean "no limit": ``transformers`` writes 1e30 for that."""


def open_tokenizer(
    source: str | os.PathLike[str],
    *,
    max_length: int | None = None,
    model_limit: int | None = None,
    revision: str = "",
) -> PretrainedTokenizer:
    """Open the tokenizer of a model's folder or hub name.

    The smallest of ``max_length``, the model's and the tokenizer's limit applies to a text.

    Raises:
        ConfigError: If the source cannot be used, or nothing limits the length of a text.
        CheckpointError: If the folder has no tokenizer, a damaged one, or one that needs its code.
    """
    folder = resolve_source(source, revision)
    require_intact(folder, besides=".safetensors")  # weights are checked where they are read
    try:
        with quiet():
            tokenizer = require_library("transformers").AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read: {first_line(error)}"
        ) from error
    files = getattr(tokenizer, "vocab_files_names", {}).values()
    if not any((folder / name).exists() for name in files):  # then transformers made one up
        raise CheckpointError(f"{folder} has no tokenizer: none of {', '.join(files)}")
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{folder}: its tokenizer has no fast version (tokenizer.json)")
    every = (max_length, model_limit, int(min(tokenizer.model_max_length, _NO_LIMIT)))
    limit = min(n for n in every if n is not None)
    if limit >= _NO_LIMIT:
        raise ConfigError(
            f"{folder}: neither model nor tokenizer limits the length of a text; give max_length"
        )
    return PretrainedTokenizer(tokenizer, limit)


class PretrainedTokenizer:
    """Turns text into ids by a fast ``transformers`` tokenizer.

    Attributes:
        max_length: Maximal ids of a text in :meth:`encode_batch`, special ones included.
        pad_id: The tokenizer's padding id; else its end-of-text id, as for GPT-2; else 0.
        bos_id: The id that the tokenizer itself writes before a text, if it does.
        special_tokens: Strings that become control tokens, wherever they occur in a text.
        vocab_size: One more than the largest id.
        fingerprint: SHA-256 of everything that determines ids.
        truncated: Number of texts encoded so far that were cut.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.truncated = 0
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id: int = next(i for i in pads if i is not None)
        self.vocab_size: int = 1 + max(tokenizer.get_vocab().values(), default=-1)
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        named = list(tokenizer.all_special_tokens)
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.special_tokens: tuple[str, ...] = tuple(dict.fromkeys(named + added))
        first = self._ids(["a"], add_special_tokens=True)[0][:1]
        bos: int | None = tokenizer.bos_token_id
        self.bos_id = bos if first == [bos] else None
        parts = [backend.to_str(), self.pad_id, max_length, tokenizer.truncation_side]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts with special tokens, cut to ``max_length``; ``truncated`` counts cuts."""
        found = self._ids(texts, add_special_tokens=True)
        cut = sum(len(ids) > self.max_length for ids in found)
        if not cut:
            return found
        self.truncated += cut
        limit = self.max_length
        return self._ids(texts, add_special_tokens=True, truncation=True, max_length=limit)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without special tokens, to any length."""
        return self._ids(texts, add_special_tokens=False)

    def _ids(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        with quiet():  # silences warnings about long texts, which encode_batch counts
            out = self._tokenizer(list(texts), **options)
        return [list(ids) for ids in out["input_ids"]]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Turn ids into text, by default without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def end_of_text(self) -> int:
        """Return the id that ends an answer and a document."""
        found: int | None = self._tokenizer.eos_token_id
        if found is None:
            raise ConfigError(
                "the tokenizer has no end-of-text token (eos_token in tokenizer_config.json), so a "
                "tuned model could not learn to stop; set one"
            )
        return found

    def end_of_turn(self) -> list[int]:
        """Return the ids with which the chat template ends an answer; none without a template."""
        if not getattr(self._tokenizer, "chat_template", None):
            return []
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        return self.encode_plain([self.chat(turns).rpartition("!")[2].rstrip()])[0]

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False
    ) -> str:
        """Write messages in the chat template, special tokens spelled out.

        ``add_generation_prompt`` ends with what precedes an answer.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                "the tokenizer has no chat template; take the model's chat version, or write "
                "instruction and output"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template raises what it likes: jinja2's errors, or its own
            raise DataError(
                f"the tokenizer's chat template refuses the conversation ({first_line(error)}); "
                "change the record"
            ) from error
        return text

    def save(self, folder: Path) -> None:
        """Write the files that :func:`open_tokenizer` and ``AutoTokenizer`` read."""
        self._tokenizer.save_pretrained(folder)


def require_vocabulary(model: Pretrained, tokenizer: PretrainedTokenizer) -> None:
    """Raise ConfigError unless every id of the tokenizer has a row in the model's embedding."""
    rows = model.core.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's embedding "
            f"has {rows} rows: tokenizer and weights are of different models"
        )
