"""Files of instructions become rows to train on; what was left out, and why, is told in notes."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.corpus.documents import Span, whole
from halfstep.trainer.data.corpus.encode import BATCH_BYTES
from halfstep.trainer.data.corpus.split import held_out, split
from halfstep.trainer.data.instructions.chat import (
    Example,
    Pair,
    Part,
    RenderChat,
    Text,
    read_prompt,
    text_parts,
)
from halfstep.trainer.data.instructions.config import (
    ALPACA,
    CHAT,
    COMPLETION,
    TEMPLATES_OF,
    TEXT,
    TOKENIZER,
    VICUNA,
    InstructionsConfig,
    check_template,
)
from halfstep.trainer.data.instructions.documents import Documents, fit
from halfstep.trainer.data.instructions.files import (
    DOCUMENT,
    SHAPES,
    InstructionFiles,
    Record,
    file_kind,
)
from halfstep.trainer.data.instructions.packing import Rows, pack
from halfstep.trainer.data.random_bits import permutation
from halfstep.trainer.data.sources import find_sources


@dataclass(frozen=True, slots=True)
class LMData:
    """What a causal-LM fine-tuning trains and is evaluated on."""

    train_rows: Rows
    dev_rows: Rows
    format: str
    """The format of all records, never ``auto``."""
    template: str
    """One of ``TEMPLATES``, the one used; ``prompt_ids`` takes it."""
    sha256: str
    """Of the ids, targets and borders of all rows: equal hashes train on equal rows."""
    notes: tuple[str, ...]
    """What was read, cut and left out, one line each, to be shown and kept with the run."""

    @property
    def learned_tokens(self) -> int:
        """Targets in an epoch of training."""
        return self.train_rows.learned_tokens


def read_instructions(config: InstructionsConfig, tokenizer: LMTokenizer, seed: int) -> LMData:
    """Reads, encodes and packs the records of a fine-tuning.

    Args:
        config: What to read and how.
        tokenizer: Of the model to be trained.
        seed: Draws the documents held out, 0 <= seed < 2**64.

    Returns:
        Rows for training and evaluation; a function of the files, the tokenizer and the arguments.

    Raises:
        ConfigError: The template cannot write the format that was found, or the seed is out of
            range.
        DataError: A file or a record cannot be used (the message names file and line), or nothing
            is left to train or to evaluate on.
    """
    if not config.train:
        raise ConfigError("data.train is empty; name a .jsonl, .json or .txt file by --train")
    encoder = TextEncoder(tokenizer)
    train_spans, dev_spans = _spans(config)
    files = InstructionFiles(train_spans, config.format)
    records = iter(files)
    first = next(records, None)
    if first is None:
        raise DataError(f"{train_spans[0].source.path}: holds no record; fill it or name another")
    template = _template(config.template, files.format, encoder)
    train = encode_records(
        chain([first], records), encoder, template, mask_prompt=config.mask_prompt
    )
    notes = [f"format {files.format} ({files.origin}), template {template}"]
    if dev_spans:
        dev_files = files.of_same_format(dev_spans)
        dev = encode_records(dev_files, encoder, template, mask_prompt=config.mask_prompt)
        files.unused |= dev_files.unused
    else:
        train, dev = hold_out(train, config.dev_fraction, seed)
        notes.append(f"dev: {len(dev)} of {len(train) + len(dev)} documents, drawn by the seed")
    if files.unused:
        notes.append(f"fields not used: {', '.join(sorted(files.unused))}")
    train_rows = _rows("train", train, files.format, config, notes)
    dev_rows = _rows("dev", dev, files.format, config, notes)
    sha256 = _sha256([train_rows, dev_rows])
    return LMData(train_rows, dev_rows, files.format, template, sha256, tuple(notes))


def prompt_ids(
    prompt: str | Mapping[str, object], tokenizer: LMTokenizer, template: str
) -> list[int]:
    """Encodes a prompt for generation with exactly the ids that stand before an answer in training.

    Args:
        prompt: The user's words, or a record as in the files, with or without its (last) answer.
        tokenizer: As in training.
        template: ``LMData.template`` of the training.

    Returns:
        The ids after which the model writes its answer, up to ``eos_id`` (or the chat template's
        own end-of-turn token).

    Raises:
        ConfigError: The template cannot write this prompt.
        DataError: The record has no prompt.
    """
    example = _prompt(prompt)
    if isinstance(example, Pair):
        # As in training, where a question with its context may be a prompt-completion record.
        bare = not example.context or (not isinstance(prompt, str) and "question" in prompt)
        check_template(COMPLETION if bare else ALPACA, template)
    else:
        check_template(CHAT, template)
    return prompt_tokens(example, TextEncoder(tokenizer), template)


def hold_out(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Draws documents for evaluation, the same for the same number of documents and seed.

    Both parts keep the order of the files.

    Args:
        documents: All of them.
        fraction: Share to hold out, in (0, 1); neither part is empty.
        seed: 0 <= seed < 2**64.

    Returns:
        (train, dev).

    Raises:
        DataError: There are fewer than two documents.
    """
    count = len(documents)
    if count < 2:
        raise DataError(
            f"{''.join(documents.places) or 'data.train'}: {count} document is too few to hold "
            f"some out for evaluation; add more, or give data.dev"
        )
    order = permutation("documents held out", seed, 0, count)
    dev = held_out(count, fraction)
    return documents.select(np.sort(order[dev:])), documents.select(np.sort(order[:dev]))


def _spans(config: InstructionsConfig) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Lists what to read for train and dev; dev is empty where documents are to be drawn."""
    train = find_sources(config.train, "data.train")
    if config.dev:
        return whole(train), whole(find_sources(config.dev, "data.dev"))
    if len(train) == 1 and file_kind(train[0], config.format) == DOCUMENT:
        return split(train, config.dev_fraction)  # one document has no others to draw from
    return whole(train), ()


def _template(asked: str, format: str, encoder: TextEncoder) -> str:
    check_template(format, asked)
    if asked:
        return asked
    if format == CHAT and not encoder.has_chat_template():
        return VICUNA
    return TEMPLATES_OF[format][0]


def _rows(
    name: str, documents: Documents, format: str, config: InstructionsConfig, notes: list[str]
) -> Rows:
    length = config.max_length
    fitted, happened = fit(documents, length, config.drop_long, text=format == TEXT)
    notes += [f"{name}: {note}" for note in happened]
    if not len(fitted):
        why = "; ".join(happened) or "there are none"
        raise DataError(
            f"data.{name}: no document of {len(documents)} is left ({why}); raise max_length "
            f"(now {length}) or give other records"
        )
    rows = pack(fitted, length, packing=config.packing)
    notes.append(
        f"{name}: {len(fitted)} documents in {len(rows)} rows of at most {rows.lengths.max()} "
        f"tokens, {rows.efficiency:.1%} full; {rows.learned_tokens} of {rows.tokens} tokens learned"
    )
    return rows


def _sha256(parts: list[Rows]) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        for values in (rows.ids, rows.targets, rows.starts, rows.documents):
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def _prompt(prompt: str | Mapping[str, object]) -> Example:
    if isinstance(prompt, str):
        return Pair(prompt, "", None)
    shape = next((shape for shape in SHAPES if shape.required[0] in prompt), None)
    if shape is None:
        fields = sorted({shape.required[0] for shape in SHAPES})
        found = ", ".join(map(repr, prompt)) or "none"
        raise DataError(f"no prompt: found the fields {found}; give one of {', '.join(fields)}")
    value = prompt[shape.required[0]]
    if shape.format == CHAT:
        return read_prompt(value)
    context = prompt.get("input") or prompt.get("context") or ""
    for words in (value, context):
        if not isinstance(words, str):
            raise DataError(f"a prompt must be a string, got {type(words).__name__}")
    return Pair(str(value), str(context), None)


# Examples become ids and, beside each id, whether it is learned: flat arrays, no list per record.
#
# A document is ``[bos] prompt answer eos [prompt answer eos ...]``. A token is learned when the
# model is trained to write it; the first token of a document never is, as nothing stands before it.


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
