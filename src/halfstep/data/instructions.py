"""Files of instructions become rows to train on; what was left out, and why, is told in notes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from halfstep.data.chat import Example, Pair, read_prompt
from halfstep.data.documents import Span, whole
from halfstep.data.instruction_documents import Documents, fit
from halfstep.data.instruction_encoding import (
    LMTokenizer,
    TextEncoder,
    encode_records,
    prompt_tokens,
)
from halfstep.data.instruction_files import DOCUMENT, SHAPES, InstructionFiles, file_kind
from halfstep.data.instructions_config import (
    ALPACA,
    CHAT,
    COMPLETION,
    TEMPLATES_OF,
    TEXT,
    VICUNA,
    InstructionsConfig,
    check_template,
)
from halfstep.data.packing import Rows, pack
from halfstep.data.random_bits import permutation
from halfstep.data.sources import find_sources
from halfstep.data.split import held_out, split
from halfstep.errors import ConfigError, DataError


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
        for array in (rows.ids, rows.targets, rows.starts, rows.documents):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
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
