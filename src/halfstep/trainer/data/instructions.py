"""Turns instruction records into rows to train on; notes say what was cut and left out.

Records come from every kind of file that ``records.py`` reads, and from datasets; any other text
file is one document. The fields of the first record determine the format of all.

A record becomes parts of text, each of which is tokenised by itself and is either learned or only
read, so that no token spans the border of a prompt and its answer: what the model sees before an
answer in training is, id by id, what generation will give it. (Tokenised together, "Response:" and
"Yes" could share a token with which no prompt ends.) A document is ``[bos] prompt answer eos
[prompt answer eos ...]``; its first token is never learned, as nothing precedes it.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.batches import permutation
from halfstep.trainer.data.config import (
    ALPACA,
    CHAT,
    COMPLETION,
    TEMPLATES_OF,
    TEXT,
    TOKENIZER,
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
    find_sources,
    is_text,
    open_records,
)

Input: TypeAlias = Span | str
"""A document or part of one, or an input of ``open_records``."""
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    CHAT: (("messages",), ()),
    ALPACA: (("instruction", "output"), ("input",)),
    COMPLETION: (("prompt", "completion"), ()),
    TEXT: (("text",), ()),
}
"""Format to the fields that a record must and may have; the first that fits is taken.

**Source:** OpenAI's chats, Stanford Alpaca, TRL's prompt-completion.
"""
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Input:\n{context}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{prompt}\n\n### Response:"
)
"""**Source:** ``PROMPT_DICT`` of ``train.py`` in tatsu-lab/stanford_alpaca."""


class Part(NamedTuple):
    """Text that is tokenised by itself."""

    text: str
    learned: bool
    ends: bool = False
    """Whether the end-of-text id follows; it is learned if the text is."""


class Document(NamedTuple):
    """A record written out, and its place in the input: ``file:line`` or ``dataset: row N``."""

    place: str
    parts: Sequence[Part]
    words: Sequence[str]
    """The texts of the record itself, which may hold no control token."""
    bos: bool
    """Whether it begins with the tokenizer's bos; chat templates write it themselves."""


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

    def render_chat(self, messages: list[Any], add_generation_prompt: bool) -> str | None:
        """Writes a conversation in the tokenizer's chat template; None where it has none.

        Raises:
            DataError: The template refuses the conversation.
        """


@dataclass(frozen=True, slots=True)
class LMData:
    """The training and evaluation data of a causal-LM fine-tuning."""

    train_rows: Rows
    dev_rows: Rows
    format: str
    """The format of all records, a key of ``FIELDS``."""
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
    train_inputs = find_inputs(config.train, "data.train")
    dev_inputs = find_inputs(config.dev, "data.dev") if config.dev else ()
    if not dev_inputs and len(train_inputs) == 1 and isinstance(train_inputs[0], Span):
        # no other documents to draw from
        train_inputs, dev_inputs = split_corpus((train_inputs[0].source,), config.dev_fraction)
    reader = _Reader(config.template, tokenizer)
    mask = config.mask_prompt
    train = encode_documents(reader.read(train_inputs, "train"), tokenizer, mask_prompt=mask)
    notes = [f"format {reader.format} ({reader.origin}), template {reader.template}"]
    if dev_inputs:
        dev = encode_documents(reader.read(dev_inputs, "dev"), tokenizer, mask_prompt=mask)
    else:
        count = len(train)
        if count < 2:
            raise DataError(
                f"data.train: {count} document is too few to hold some out for evaluation; add "
                f"more, or give data.dev"
            )
        order = permutation("documents held out", seed, 0, count)
        share = held_out(count, config.dev_fraction)
        dev, train = train.select(np.sort(order[:share])), train.select(np.sort(order[share:]))
        notes.append(f"dev: {len(dev)} of {count} documents, drawn by the seed")
    if reader.unused:
        notes.append(f"fields not used: {', '.join(sorted(reader.unused))}")
    train_rows = _rows("train", train, reader.format, config, notes)
    dev_rows = _rows("dev", dev, reader.format, config, notes)
    sha256 = _sha256([train_rows, dev_rows])
    return LMData(train_rows, dev_rows, reader.format, reader.template, sha256, tuple(notes))


def prompt_ids(prompt: str, tokenizer: LMTokenizer, template: str) -> list[int]:
    """Encodes the user's words into exactly the ids that precede an answer in training.

    After them the model writes its answer, up to ``eos_id`` (or the chat template's own end-of-turn
    token). ``template`` is ``LMData.template`` of the training.
    """
    parts = pair_parts(prompt, "", None, template, tokenizer.render_chat)
    document = Document("the prompt", parts, [prompt], template != TOKENIZER)
    ids: list[int] = encode_documents([document], tokenizer, mask_prompt=True).ids.tolist()
    return ids


def _rows(
    name: str, documents: Documents, format: str, config: InstructionsConfig, notes: list[str]
) -> Rows:
    length = config.max_length
    fitted, happened = fit(documents, length, text=format == TEXT)
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


def encode_documents(
    documents: Iterable[Document], tokenizer: LMTokenizer, *, mask_prompt: bool
) -> Documents:
    """Encodes documents, a few megabytes of text at a time; with the mask only answers are learned.

    Raises:
        DataError: A text holds control tokens or no UTF-8; the message names its place.
    """
    words = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, words))) if words else None
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids, learned, starts = array("i"), bytearray(), array("q", [0])

    def parts() -> Iterator[tuple[Part, bool, bool]]:
        for document in documents:
            _check(document, special)
            for number, part in enumerate(document.parts, 1):
                yield part, document.bos, number == len(document.parts)

    for batch in in_batches(parts(), lambda item: len(item[0].text)):
        encoded = tokenizer.encode_batch([part.text for part, _, _ in batch])
        for (part, begins, last), tokens in zip(batch, encoded, strict=True):
            begin = bos if begins and len(ids) == starts[-1] else []
            tokens = [*begin, *tokens, *([tokenizer.eos_id] if part.ends else [])]
            ids.extend(tokens)
            learned.extend(bytes([part.learned or not mask_prompt]) * len(tokens))
            if last:
                starts.append(len(ids))
    found = Documents(
        np.array(ids, dtype=np.int32),
        np.array(learned, dtype=np.bool_),
        np.array(starts, dtype=np.int64),
    )
    found.learned[found.starts[:-1][found.lengths > 0]] = False
    return found


def _check(document: Document, special: re.Pattern[str] | None) -> None:
    """Raises DataError if a text holds control tokens or cannot be written as UTF-8."""
    for text in document.words:
        if not is_text(text):
            raise DataError(f"{document.place}: a text holds half a surrogate pair; remove it")
        if special and (found := special.search(text)):
            raise DataError(
                f"{document.place}: a text holds {found[0]!r}, which the tokenizer would turn into "
                f"a control token; remove it (documents are separated by files or records)"
            )


def find_inputs(paths: tuple[str, ...], field: str) -> tuple[Input, ...]:
    """Lists what paths, folders and names of datasets stand for, in the order given."""
    found: list[Input] = []
    for given in paths:
        if given.startswith(HUB_PREFIX):
            found.append(given)
            continue
        for source in find_sources((given,), field):
            suffix = source.path.suffix.lower()
            if suffix in READERS:
                found.append(str(source.path))
            elif suffix in TEXT_SUFFIXES:
                found += whole([source])
            else:
                raise DataError(
                    f"{source.path}: instructions are read from {', '.join(READERS)} and "
                    f"{', '.join(TEXT_SUFFIXES)} files; convert or rename it"
                )
    return tuple(found)


class _Reader:
    """Writes the records of inputs out, all in the format of the first one.

    Attributes:
        format: The format, "" until the first record is read.
        origin: The place of the first record.
        template: The template that was asked for; then the one that is used.
        unused: Names of the fields that were left out so far.
    """

    def __init__(self, template: str, tokenizer: LMTokenizer) -> None:
        self.format = self.origin = ""
        self.template = template
        self.unused: set[str] = set()
        self._render = tokenizer.render_chat

    def read(self, inputs: Iterable[Input], role: str) -> Iterator[Document]:
        """Yields documents; ``role``, ``train`` or ``dev``, is for the usual split of a dataset.

        Raises:
            DataError: An input cannot be read, or a record is of another format, or has a bad
                value; the message names file and line.
        """
        for given in inputs:
            if isinstance(given, Span):
                self._take_format(TEXT, f"{given.source.path}:1")
                texts = [piece.text for piece in read_pieces([given])]
                if texts:
                    yield self._text(f"{given.source.path}:1", texts)
                continue
            for place, record in open_records(given, role):
                try:
                    document = self._document(record, place)
                except DataError as error:
                    raise DataError(f"{place}: {error}") from None
                yield document
        if not self.format:
            raise DataError("data.train holds no record; fill it or name another file")

    def _document(self, record: object, place: str) -> Document:
        if not isinstance(record, dict):
            raise DataError(f"a JSON {type(record).__name__}, not an object; write {{...}}")
        record = {key: value for key, value in record.items() if value is not None}
        format = next((f for f, (must, _) in FIELDS.items() if record.keys() >= set(must)), "")
        if not format:
            found = ", ".join(sorted(map(repr, record))[:8]) or "none"
            allowed = "; or ".join(", ".join(must) for must, _ in FIELDS.values())
            raise DataError(f"unknown fields: found {found}; allowed: {allowed}; rename fields")
        self._take_format(format, place)
        must, may = FIELDS[format]
        self.unused |= set(record).difference(must, may)
        if format == CHAT:
            messages = _messages(record["messages"])
            words = [message["content"] for message in messages]
            return Document(place, chat_parts(messages, self._render), words, bos=False)
        for field in (*must, *may):
            if not isinstance(record.get(field, ""), str):
                kind = type(record[field]).__name__
                raise DataError(f'"{field}" must be a string, got {kind}')
            if field in must and not record[field].strip():
                raise DataError(f'"{field}" is empty; fill it or leave the record out')
        if format == TEXT:
            return self._text(place, [record["text"]])
        prompt, answer, context = record[must[0]], record[must[1]], record.get("input", "")
        context = context if may else ""
        parts = pair_parts(prompt, context, answer, self.template, self._render)
        return Document(place, parts, [prompt, context, answer], self.template != TOKENIZER)

    def _take_format(self, format: str, place: str) -> None:
        if not self.format:
            check_template(format, self.template)
            self.format, self.origin = format, place
            self.template = self.template or TEMPLATES_OF[format][0]
        elif format != self.format:
            raise DataError(
                f"records of two formats: {format} here, and {self.format} at {self.origin}; give "
                f"records of one"
            )

    @staticmethod
    def _text(place: str, pieces: Sequence[str]) -> Document:
        parts = [Part(piece, True) for piece in pieces]
        return Document(place, [*parts[:-1], parts[-1]._replace(ends=True)], pieces, bos=True)


Messages: TypeAlias = list[dict[str, str]]
RenderChat: TypeAlias = Callable[[Messages, bool], str | None]
"""(messages, add_generation_prompt) to text, or None where the tokenizer has no chat template."""


def _messages(value: object) -> Messages:
    """Checks the messages of a conversation; which roles may follow each other, its template says.

    What follows the last answer is left out, as nothing is learned from it.
    """
    if not isinstance(value, list):
        raise DataError(f'"messages" must be a list, got {type(value).__name__}')
    for number, message in enumerate(value, 1):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise DataError(f"turn {number} must have a role and a content, both strings")
    answers = [n for n, message in enumerate(value, 1) if message["role"] == "assistant"]
    if not answers:
        raise DataError("the conversation has no turn of the assistant to learn from; add one")
    return value[: answers[-1]]


def pair_parts(
    prompt: str, context: str, answer: str | None, template: str, render: RenderChat
) -> list[Part]:
    """Writes out a prompt and its answer; without an answer, the parts that precede one."""
    question = f"{prompt}\n\n{context}" if context else prompt
    if template == TOKENIZER:
        messages = [{"role": "user", "content": question}]
        if answer is None:
            return [Part(_render(messages, True, render), False)]
        return chat_parts([*messages, {"role": "assistant", "content": answer}], render)
    if template == ALPACA:
        words = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
        question = words.format(prompt=prompt, context=context)
    return [Part(question, False), *([] if answer is None else [Part(answer, True, ends=True)])]


def chat_parts(messages: Messages, render: RenderChat) -> list[Part]:
    """Finds the answers in what the tokenizer's chat template writes.

    For each answer: ``before`` is the text of the turns before it with the generation prompt,
    ``after`` the text of the turns up to it. ``after`` must start with ``before``, and what is left
    is the answer and its end; the next ``before`` must start with that. So the text of a
    conversation only ever grows, and every ``before`` is what generation would be given.
    """
    parts: list[Part] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:number], True, render)
        after = _render(messages[: number + 1], False, render)
        # Blanks after the end-of-turn token belong to what follows.
        answer, content = after.removeprefix(before).rstrip(), message["content"].strip()
        if not (before.startswith(done) and after.startswith(before) and content in answer):
            raise DataError(
                "the tokenizer's chat template writes earlier turns in another way when later ones "
                "follow, or changes answers (it may take out <think> blocks), so answers cannot be "
                "told from prompts; write one answer a record, or instruction and output"
            )
        if answer.endswith(content):
            raise DataError(
                "the tokenizer's chat template writes no end-of-turn token after an answer, so a "
                "model could not learn where to stop; write instruction and output"
            )
        parts += [Part(before.removeprefix(done), False), Part(answer, True)]
        done = before + answer
    return parts


def _render(messages: Messages, prompt: bool, render: RenderChat) -> str:
    text = render(messages, prompt)
    if text is None:
        raise DataError(
            "the tokenizer has no chat template; take the model's chat version, or write "
            "instruction and output"
        )
    return text
