"""Examples become ids and, beside each id, whether it is learned: flat arrays, no list per record.

A document is ``[bos] prompt answer eos [prompt answer eos ...]``. A token is learned when the model
is trained to write it; the first token of a document never is, as nothing stands before it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from halfstep.data.chat import Example, Pair, Part, RenderChat, Text, text_parts
from halfstep.data.encode import BATCH_BYTES
from halfstep.data.instruction_documents import Documents
from halfstep.data.instruction_files import Record
from halfstep.data.instructions_config import TOKENIZER
from halfstep.errors import ConfigError, DataError


class LMTokenizer(Protocol):
    """What fine-tuning needs to know of a tokenizer.

    These are used too where it has them: ``bos_id: int | None``, written at the start of a document
    (a chat template writes its own); ``encode_batch(texts)``, each as ``encode`` would;
    ``special_tokens: Sequence[str]``, words that ``encode`` turns into control tokens, so that data
    must not hold them; ``render_chat(messages, add_generation_prompt) -> str | None``, its chat
    template.
    """

    @property
    def eos_id(self) -> int:
        """The id that ends an answer and a document."""

    def encode(self, text: str) -> list[int]:
        """Turns a text into ids, adding none."""


class TextEncoder:
    """A tokenizer with the optional members settled."""

    def __init__(self, tokenizer: LMTokenizer) -> None:
        self._encode = tokenizer.encode
        self._encode_batch: Callable[[Sequence[str]], list[list[int]]] | None = getattr(
            tokenizer, "encode_batch", None
        )
        self.eos_id = tokenizer.eos_id
        bos_id: int | None = getattr(tokenizer, "bos_id", None)
        self._bos = [] if bos_id is None else [bos_id]
        self.render: RenderChat | None = getattr(tokenizer, "render_chat", None)
        special: Sequence[str] = getattr(tokenizer, "special_tokens", ())
        words = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words))) if words else None
        self._compared = False

    def has_chat_template(self) -> bool:
        """Whether the tokenizer can render a conversation; tried on one question."""
        if self.render is None:
            return False
        try:
            return self.render([{"role": "user", "content": "?"}], True) is not None
        except Exception:  # it has one, and whoever uses it is told what is wrong with it
            return True

    def before(self, template: str) -> list[int]:
        """Returns the ids a document starts with: bos, unless the chat template writes it."""
        return [] if template == TOKENIZER else self._bos

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text by itself.

        Raises:
            ConfigError: ``encode_batch`` and ``encode`` of the tokenizer disagree.
        """
        if self._encode_batch is None:
            return [self._encode(text) for text in texts]
        found = self._encode_batch(texts)
        if texts and not self._compared:
            self._compared = True
            if list(found[0]) != list(self._encode(texts[0])):
                raise ConfigError(
                    "the tokenizer's encode_batch gives other ids than encode (it must add no "
                    "special token and cut nothing); mend it or take encode_batch away"
                )
        return found

    def check(self, example: Example) -> None:
        """Makes sure that an example is text and nothing but text.

        Raises:
            DataError: It holds half a surrogate pair, or a control token written out.
        """
        for text in _texts(example):
            if not text.isascii():
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:
                    raise DataError(
                        "a text holds half a surrogate pair (\\ud800 to \\udfff); remove it"
                    ) from None
            found = self._special.search(text) if self._special else None
            if found:
                raise DataError(
                    f"a text holds {found[0]!r}, which the tokenizer would turn into a control "
                    f"token; remove it (documents are separated by files or records)"
                )


def encode_records(
    records: Iterable[Record], encoder: TextEncoder, template: str, *, mask_prompt: bool
) -> Documents:
    """Writes records out in a template and encodes them, a few megabytes of text at a time.

    Args:
        records: What to encode.
        encoder: The tokenizer.
        template: One of ``TEMPLATES`` that can write these records.
        mask_prompt: Whether prompts are left unlearned.

    Returns:
        The documents in order.

    Raises:
        DataError: A record cannot be written or read; the message names its place.
    """
    ids, learned, starts, places = array("i"), bytearray(), array("q", [0]), list[str]()
    for batch in _batches(_parts(records, encoder, template)):
        encoded = encoder.encode([part.text for _, part, _ in batch])
        for (place, part, last), tokens in zip(batch, encoded, strict=True):
            if len(ids) == starts[-1]:
                bos = encoder.before(template)
                ids.extend(bos)
                learned.extend(bytes([not mask_prompt]) * len(bos))
            ids.extend(tokens)
            learn = part.learned or not mask_prompt
            learned.extend(bytes([learn]) * len(tokens))
            if part.ends:
                ids.append(encoder.eos_id)
                learned.append(1)
            if last:
                starts.append(len(ids))
                places.append(place)
    documents = Documents(
        np.frombuffer(ids, dtype=np.int32) if ids else np.zeros(0, dtype=np.int32),
        np.frombuffer(learned, dtype=np.bool_).copy(),
        np.array(starts, dtype=np.int64),
        tuple(places),
    )
    documents.learned[documents.starts[:-1][documents.lengths > 0]] = False
    return documents


def prompt_tokens(example: Example, encoder: TextEncoder, template: str) -> list[int]:
    """Encodes an example without its last answer, part by part as ``encode_records`` does.

    Raises:
        DataError: It cannot be written or read.
    """
    encoder.check(example)
    parts = text_parts(example, template, encoder.render)
    ids = list(encoder.before(template))
    for part, tokens in zip(parts, encoder.encode([part.text for part in parts]), strict=True):
        ids += [*tokens, encoder.eos_id] if part.ends else tokens
    return ids


def _texts(example: Example) -> Iterator[str]:
    if isinstance(example, Pair):
        yield from (example.prompt, example.context, example.answer or "")
    elif isinstance(example, Text):
        yield from example.pieces
    else:
        yield from (message.content for message in example)


def _parts(
    records: Iterable[Record], encoder: TextEncoder, template: str
) -> Iterator[tuple[str, Part, bool]]:
    """Yields (place, part, whether it is the last of its document)."""
    for place, example in records:
        try:
            encoder.check(example)
            parts = text_parts(example, template, encoder.render)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        for number, part in enumerate(parts, 1):
            yield place, part, number == len(parts)


def _batches(parts: Iterable[tuple[str, Part, bool]]) -> Iterator[list[tuple[str, Part, bool]]]:
    batch: list[tuple[str, Part, bool]] = []
    size = 0
    for item in parts:
        batch.append(item)
        size += len(item[1].text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
