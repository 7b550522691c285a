"""Turns instruction records into rows to train on; notes say what was left out, and why.

Records come from every kind of file that ``records.py`` reads, and from datasets; any other text
file is one document. A record's fields determine its format, and every field must belong to that
format: a field that is not read is usually a mistake, and changes what is learned.

Examples become ids and, for each id, whether it is learned, in flat arrays. A document is
``[bos] prompt answer eos [prompt answer eos ...]``. A token is learned when the model is trained to
write it; the first token of a document never is, as nothing precedes it.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.batches import permutation
from halfstep.trainer.data.chat import (
    ChatPart,
    Example,
    Pair,
    Text,
    read_messages,
    read_prompt,
    text_parts,
)
from halfstep.trainer.data.config import (
    ALPACA,
    AUTO,
    CHAT,
    COMPLETION,
    TEMPLATES_OF,
    TEXT,
    TOKENIZER,
    VICUNA,
    InstructionsConfig,
    check_template,
)
from halfstep.trainer.data.corpus import (
    Span,
    held_out,
    in_batches,
    read_pieces,
    split_corpus,
    whole,
)
from halfstep.trainer.data.packing import Documents, Rows, fit, pack
from halfstep.trainer.data.records import (
    HUB_PREFIX,
    READERS,
    TABLE_SUFFIXES,
    find_sources,
    is_text,
    open_records,
)

Input: TypeAlias = Span | str
"""A document or part of one, or an input of ``open_records``."""
ASKED = "data.format"
"""The origin of a format that the user named, for messages."""
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".text")
"""Suffixes that are plain text; with ``format = "text"`` other suffixes and tables are, too."""
METADATA = frozenset(
    """
    id idx index uuid conversation_id prompt_id source dataset category subset split lang language
    license tags url meta metadata model
    """.split()  # noqa: SIM905
)
"""Fields that describe a record and are left out; ``InstructionFiles.unused`` tells which."""


class Shape(NamedTuple):
    """The fields of one kind of record."""

    format: str
    """The format that ``auto`` assigns to such records."""
    accepted: tuple[str, ...]
    """Formats under which such records are accepted when the user names one."""
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


PAIR_FORMATS = (ALPACA, COMPLETION)
SHAPES = (
    Shape(ALPACA, (ALPACA,), ("instruction", "output"), ("input",)),
    Shape(ALPACA, (ALPACA,), ("instruction", "response"), ("context",)),
    Shape(ALPACA, PAIR_FORMATS, ("question", "answer"), ("context",)),
    Shape(COMPLETION, PAIR_FORMATS, ("prompt", "completion")),
    Shape(CHAT, (CHAT,), ("messages",)),
    Shape(CHAT, (CHAT,), ("conversations",)),
    Shape(TEXT, (TEXT,), ("text",)),
)
"""**Source:** Stanford Alpaca, Databricks Dolly, TRL's prompt-completion, OpenAI, ShareGPT."""


KNOWN = frozenset(field for shape in SHAPES for field in (*shape.required, *shape.optional))


class PlacedExample(NamedTuple):
    """An example and its place in the input."""

    place: str
    """``file:line``, the line of its first character; or ``dataset: row N``."""
    example: Example


class LMTokenizer(Protocol):
    """The interface of a tokenizer that fine-tuning needs."""

    eos_id: int
    """The id that ends an answer and a document."""
    bos_id: int | None
    """The id that starts a document, unless a chat template wrote it; None for none."""
    special_tokens: Sequence[str]
    """Strings that encoding turns into control tokens, and so are not allowed in data."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns each text into ids by itself, adding none and cutting nothing."""

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> str | None:
        """Writes a conversation in the tokenizer's chat template; None where it has none."""


@dataclass(frozen=True, slots=True)
class LMData:
    """The training and evaluation data of a causal-LM fine-tuning."""

    train_rows: Rows
    dev_rows: Rows
    format: str
    """The format of all records, never ``auto``."""
    template: str
    """The template that was used; an argument of ``prompt_ids``."""
    sha256: str
    """Hash of the ids, targets and borders of all rows: equal hashes mean equal rows."""
    notes: tuple[str, ...]
    """What was read, cut and left out, one line each, for the user."""


def read_instructions(config: InstructionsConfig, tokenizer: LMTokenizer, seed: int) -> LMData:
    """Reads, encodes and packs the records of a fine-tuning.

    The rows are a function of the files, the tokenizer and the arguments; the seed, 0 <= seed <
    2**64, draws the documents held out.

    Raises:
        ConfigError: The template cannot write the format that was found.
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
    """Encodes a prompt for generation into exactly the ids that precede an answer in training.

    After them the model writes its answer, up to ``eos_id`` (or the chat template's own end-of-turn
    token).

    Args:
        prompt: The user's words, or a record as in the files, with or without its (last) answer.
        tokenizer: As in training.
        template: ``LMData.template`` of the training.

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
    ids: list[int] = encode_records(
        [PlacedExample("", example)], tokenizer, template, mask_prompt=True
    ).ids.tolist()
    return ids


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
    """Lists the inputs of train and dev; dev is empty if documents are to be held out of train."""
    train = find_inputs(config.train, "data.train", config.format)
    if config.dev:
        return train, find_inputs(config.dev, "data.dev", config.format)
    if len(train) == 1 and isinstance(train[0], Span):
        return split_corpus(
            (train[0].source,), config.dev_fraction
        )  # no other documents to draw from
    return train, ()


def _template(asked: str, format: str, tokenizer: LMTokenizer) -> str:
    check_template(format, asked)
    if asked or format != CHAT:
        return asked or TEMPLATES_OF[format][0]
    try:
        text = tokenizer.render_chat([{"role": "user", "content": "?"}], True)
    except Exception:  # it has one, and whoever uses it is told what is wrong with it
        return TOKENIZER
    return VICUNA if text is None else TOKENIZER


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
    """Raises DataError if an example holds control tokens or cannot be written as UTF-8."""
    if isinstance(example, Pair):
        texts = [example.prompt, example.context, example.answer or ""]
    elif isinstance(example, Text):
        texts = [*example.pieces]
    else:
        texts = [message.content for message in example]
    for text in texts:
        if not is_text(text):
            raise DataError("a text holds half a surrogate pair (\\ud800 to \\udfff); remove it")
        if special and (found := special.search(text)):
            raise DataError(
                f"a text holds {found[0]!r}, which the tokenizer would turn into a control token; "
                f"remove it (documents are separated by files or records)"
            )


def encode_records(
    records: Iterable[PlacedExample], tokenizer: LMTokenizer, template: str, *, mask_prompt: bool
) -> Documents:
    """Writes records out in a template and encodes them, a few megabytes of text at a time.

    The template can write these records; with ``mask_prompt`` prompts are left unlearned.

    Raises:
        DataError: A record cannot be written or read; the message names its place.
    """
    # The chat template writes bos itself.
    bos = [] if template == TOKENIZER or tokenizer.bos_id is None else [tokenizer.bos_id]
    parts = _parts(records, tokenizer, template)
    ids, learned, starts, places = array("i"), bytearray(), array("q", [0]), list[str]()
    for batch in in_batches(parts, lambda item: len(item[1].text)):
        encoded = tokenizer.encode_batch([part.text for _, part, _ in batch])
        for (place, part, last), tokens in zip(batch, encoded, strict=True):
            begin = bos if len(ids) == starts[-1] else []
            tokens = [*begin, *tokens, *([tokenizer.eos_id] if part.ends else [])]
            ids.extend(tokens)
            learned.extend(bytes([part.learned or not mask_prompt]) * len(tokens))
            if last:
                starts.append(len(ids))
                places.append(place)
    documents = Documents(
        np.array(ids, dtype=np.int32),
        np.array(learned, dtype=np.bool_),
        np.array(starts, dtype=np.int64),
        tuple(places),
    )
    documents.learned[documents.starts[:-1][documents.lengths > 0]] = False
    return documents


def _parts(
    records: Iterable[PlacedExample], tokenizer: LMTokenizer, template: str
) -> Iterator[tuple[str, ChatPart, bool]]:
    """Yields (place, part, whether it is the last of its document)."""
    words = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, words))) if words else None
    for place, example in records:
        try:
            _check(example, special)
            parts = text_parts(example, template, tokenizer.render_chat)
        except DataError as error:
            raise DataError(f"{place}: {error}" if place else str(error)) from None
        for number, part in enumerate(parts, 1):
            yield place, part, number == len(parts)


# Inputs become examples, each with its place for messages.


def find_inputs(paths: tuple[str, ...], field: str, format: str) -> tuple[Input, ...]:
    """Lists what paths, globs, folders and names of datasets stand for, in the order given."""
    found: list[Input] = []
    for given in paths:
        if given.startswith(HUB_PREFIX):
            found.append(given)
            continue
        for source in find_sources((given,), field):
            suffix = source.path.suffix.lower()
            as_text = format == TEXT
            if suffix in READERS and not (as_text and suffix in TABLE_SUFFIXES):
                found.append(str(source.path))
            elif as_text or suffix in TEXT_SUFFIXES:
                found += whole([source])
            else:
                raise DataError(
                    f"{source.path}: instructions are read from {', '.join(READERS)} and "
                    f".txt files; convert it, or give data.format = text if it is plain text"
                )
    return tuple(found)


class InstructionFiles:
    """The examples of inputs of one format, read anew at every iteration.

    A DataError names file and line: an input cannot be read, or a record has other fields than its
    format, or a bad value. The ``role``, ``train`` or ``dev``, is for the usual split of a dataset.

    Attributes:
        format: The format, ``auto`` until the first record is read.
        origin: Where the format is from: ``data.format``, or the place of the first record.
        unused: Names of the fields that were left out so far.
    """

    def __init__(self, inputs: Iterable[Input], format: str = AUTO, role: str = "train") -> None:
        self.inputs = tuple(inputs)
        self.format = format
        self.role = role
        self.unused: set[str] = set()
        self.origin = "" if format == AUTO else ASKED

    def of_same_format(self, inputs: Iterable[Input]) -> InstructionFiles:
        """Other inputs, for evaluation, of the format that these turned out to have."""
        others = InstructionFiles(inputs, self.format, "dev")
        others.origin = self.origin
        return others

    def __iter__(self) -> Iterator[PlacedExample]:
        for given in self.inputs:
            if isinstance(given, Span):
                yield from self._document(given)
                continue
            records = open_records(given, self.role)
            for place, value in records.rows:
                if records.header is not None:
                    value = dict(zip(records.header, value, strict=True))
                yield PlacedExample(place, self._example(value, place))

    def _document(self, span: Span) -> Iterator[PlacedExample]:
        place = f"{span.source.path}:1"
        if self.format == AUTO:
            self.format, self.origin = TEXT, place
        if self.format != TEXT:
            raise DataError(
                f"{span.source.path}: a text file, but {self.origin} says {self.format}; such "
                f"records stand in .jsonl or .json files"
            )
        pieces = tuple(piece.text for piece in read_pieces([span]))
        if pieces:
            yield PlacedExample(place, Text(pieces))

    def _example(self, value: object, place: str) -> Example:
        if not isinstance(value, dict):
            found = f"a JSON {type(value).__name__}, not an object"
            raise DataError(f"{place}: {found}; write {{...}} for every record")
        record = {key: held for key, held in value.items() if held is not None}
        shape = self._shape(record, place)
        try:
            return _read(shape, record)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None

    def _shape(self, record: dict[str, object], place: str) -> Shape:
        explicit = self.origin == ASKED
        allowed = [
            shape
            for shape in SHAPES
            if self.format in (shape.accepted if explicit else (AUTO, shape.format))
        ]
        # a field that is not read is usually a mistake, unless another format was asked for
        spare = METADATA | KNOWN if explicit else METADATA
        matching = [shape for shape in allowed if record.keys() >= set(shape.required)]
        if len(matching) == 1:
            (shape,) = allowed = matching
            others = set(record).difference(shape.required, shape.optional)
            if others <= spare:
                self.unused |= others
                if self.format == AUTO:
                    self.format, self.origin = shape.format, place
                return shape
        found = ", ".join(sorted(map(repr, record))[:8]) or "none"
        choices = "; or ".join(
            ", ".join(shape.required)
            + (f" (and {', '.join(shape.optional)})" if shape.optional else "")
            for shape in allowed
        )
        why = f" (the format is {self.format}, from {self.origin})" if self.origin else ""
        raise DataError(
            f"{place}: unknown fields: found {found}; allowed: {choices}{why}; rename or remove "
            f"fields, or give data.format"
        )


def _read(shape: Shape, record: dict[str, object]) -> Example:
    if shape.format == CHAT:
        return read_messages(record[shape.required[0]])
    values = [_string(record, field) for field in shape.required]
    if shape.format == TEXT:
        return Text((values[0],))
    context = _string(record, shape.optional[0], "") if shape.optional else ""
    return Pair(values[0], context, values[1])


def _string(record: dict[str, object], field: str, default: str | None = None) -> str:
    value = record.get(field, default)
    if not isinstance(value, str):
        kind = type(value).__name__
        hint = "; conversations go into messages" if isinstance(value, list) else ""
        raise DataError(f'"{field}" must be a string, got {kind}{hint}')
    if default is None and not value.strip():
        raise DataError(f'"{field}" is empty; fill it or leave the record out')
    return value
