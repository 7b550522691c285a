"""Inputs of instructions become rows to train on; what was left out, and why, is told in notes.

Examples become ids and, beside each id, whether it is learned: flat arrays, no list per record. A
document is ``[bos] prompt answer eos [prompt answer eos ...]``. A token is learned when the model
is trained to write it; the first token of a document never is, as nothing stands before it.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.corpus.documents import Span, in_batches
from halfstep.trainer.data.corpus.split import held_out, split
from halfstep.trainer.data.instructions.chat import (
    Example,
    Pair,
    Part,
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
from halfstep.trainer.data.instructions.files import (
    SHAPES,
    Input,
    InstructionFiles,
    PlacedExample,
    find_inputs,
)
from halfstep.trainer.data.instructions.packing import Documents, Rows, fit, pack
from halfstep.trainer.data.random_bits import permutation
from halfstep.trainer.data.records import is_text


class LMTokenizer(Protocol):
    """What fine-tuning needs to know of a tokenizer."""

    @property
    def eos_id(self) -> int:
        """The id that ends an answer and a document."""

    @property
    def bos_id(self) -> int | None:
        """The id that starts a document, unless a chat template wrote it; None for none."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Words that encoding turns into control tokens, so that data must not hold them."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns each text into ids by itself, adding none and cutting nothing."""

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> str | None:
        """Writes a conversation in the tokenizer's chat template; None where it has none."""


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
    train_inputs, dev_inputs = _inputs(config)
    files = InstructionFiles(train_inputs, config.format)
    records = iter(files)
    first = next(records, None)
    if first is None:
        given = train_inputs[0]
        name = given.source.path if isinstance(given, Span) else given
        raise DataError(f"{name}: holds no record; fill it or name another")
    template = _template(config.template, files.format, tokenizer)
    train = encode_records(
        chain([first], records), tokenizer, template, mask_prompt=config.mask_prompt
    )
    notes = [f"format {files.format} ({files.origin}), template {template}"]
    if dev_inputs:
        dev_files = files.of_same_format(dev_inputs)
        dev = encode_records(dev_files, tokenizer, template, mask_prompt=config.mask_prompt)
        files.unused |= dev_files.unused
    else:
        train, dev = _hold_out(train, config.dev_fraction, seed)
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
    return prompt_tokens(example, tokenizer, template)


def _hold_out(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Draws documents for evaluation, the same for the same number of documents and seed."""
    count = len(documents)
    if count < 2:
        raise DataError(
            f"{''.join(documents.places) or 'data.train'}: {count} document is too few to hold "
            f"some out for evaluation; add more, or give data.dev"
        )
    order = permutation("documents held out", seed, 0, count)
    dev = held_out(count, fraction)
    return documents.select(np.sort(order[dev:])), documents.select(np.sort(order[:dev]))


def _inputs(config: InstructionsConfig) -> tuple[tuple[Input, ...], tuple[Input, ...]]:
    """Lists what to read for train and dev; dev is empty where documents are to be drawn."""
    train = find_inputs(config.train, "data.train", config.format)
    if config.dev:
        return train, find_inputs(config.dev, "data.dev", config.format)
    if len(train) == 1 and isinstance(train[0], Span):
        return split((train[0].source,), config.dev_fraction)  # no other documents to draw from
    return train, ()


def _template(asked: str, format: str, tokenizer: LMTokenizer) -> str:
    check_template(format, asked)
    if asked:
        return asked
    if format == CHAT and not _has_chat_template(tokenizer):
        return VICUNA
    return TEMPLATES_OF[format][0]


def _has_chat_template(tokenizer: LMTokenizer) -> bool:
    try:
        return tokenizer.render_chat([{"role": "user", "content": "?"}], True) is not None
    except Exception:  # it has one, and whoever uses it is told what is wrong with it
        return True


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


def _check(example: Example, special: re.Pattern[str] | None) -> None:
    """Makes sure that an example is text and nothing but text."""
    for text in _texts(example):
        if not is_text(text):
            raise DataError("a text holds half a surrogate pair (\\ud800 to \\udfff); remove it")
        if special and (found := special.search(text)):
            raise DataError(
                f"a text holds {found[0]!r}, which the tokenizer would turn into a control token; "
                f"remove it (documents are separated by files or records)"
            )


def _control_words(tokenizer: LMTokenizer) -> re.Pattern[str] | None:
    words = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def _before(tokenizer: LMTokenizer, template: str) -> list[int]:
    """The ids a document starts with: bos, unless the chat template writes it."""
    return [] if template == TOKENIZER or tokenizer.bos_id is None else [tokenizer.bos_id]


def _texts(example: Example) -> Iterator[str]:
    if isinstance(example, Pair):
        yield from (example.prompt, example.context, example.answer or "")
    elif isinstance(example, Text):
        yield from example.pieces
    else:
        yield from (message.content for message in example)


def encode_records(
    records: Iterable[PlacedExample], tokenizer: LMTokenizer, template: str, *, mask_prompt: bool
) -> Documents:
    """Writes records out in a template and encodes them, a few megabytes of text at a time.

    Args:
        records: What to encode.
        tokenizer: Of the model.
        template: One of ``TEMPLATES`` that can write these records.
        mask_prompt: Whether prompts are left unlearned.

    Returns:
        The documents in order.

    Raises:
        DataError: A record cannot be written or read; the message names its place.
    """
    bos = _before(tokenizer, template)
    parts = _parts(records, tokenizer, template)
    ids, learned, starts, places = array("i"), bytearray(), array("q", [0]), list[str]()
    for batch in in_batches(parts, lambda item: len(item[1].text)):
        encoded = tokenizer.encode_batch([part.text for _, part, _ in batch])
        for (place, part, last), tokens in zip(batch, encoded, strict=True):
            if len(ids) == starts[-1]:
                ids.extend(bos)
                learned.extend(bytes([not mask_prompt]) * len(bos))
            ids.extend(tokens)
            learn = part.learned or not mask_prompt
            learned.extend(bytes([learn]) * len(tokens))
            if part.ends:
                ids.append(tokenizer.eos_id)
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


def prompt_tokens(example: Example, tokenizer: LMTokenizer, template: str) -> list[int]:
    """Encodes an example without its last answer, part by part as ``encode_records`` does.

    Raises:
        DataError: It cannot be written or read.
    """
    _check(example, _control_words(tokenizer))
    parts = text_parts(example, template, tokenizer.render_chat)
    ids = _before(tokenizer, template)
    encoded = tokenizer.encode_batch([part.text for part in parts])
    for part, tokens in zip(parts, encoded, strict=True):
        ids += [*tokens, tokenizer.eos_id] if part.ends else tokens
    return ids


def _parts(
    records: Iterable[PlacedExample], tokenizer: LMTokenizer, template: str
) -> Iterator[tuple[str, Part, bool]]:
    """Yields (place, part, whether it is the last of its document)."""
    special = _control_words(tokenizer)
    for place, example in records:
        try:
            _check(example, special)
            parts = text_parts(example, template, tokenizer.render_chat)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        for number, part in enumerate(parts, 1):
            yield place, part, number == len(parts)
