"""Turns instruction records into rows to train on; notes say what was cut and left out.

Records come from every kind of file that ``records.py`` reads, and from datasets; any other text
file is one document. The fields of the first record determine the format of all.

A record becomes parts of text, each of which is tokenised by itself and is either learned or only
read, so that no token spans the border of a prompt and its answer: what the model sees before an
answer in training is, id by id, what generation will give it. (Tokenised together, "Response:" and
"Yes" could share a token with which no prompt ends.) A document is ``[bos] prompt answer eos
[prompt answer eos ...]``; its first token is never learned, as nothing precedes it.

A row holds documents end to end, so that few positions are padding. Position ids restart at 0 where
a document begins, by which a model tells documents apart, and no target crosses into the next one.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from halfstep.errors import DataError
from halfstep.trainer.data.batches import Indices, held_out, padded, permutation
from halfstep.trainer.data.config import InstructionsConfig
from halfstep.trainer.data.corpus import in_batches, read_pieces, split_corpus
from halfstep.trainer.data.records import HUB_PREFIX, READERS, Source, find_sources, open_records
from halfstep.trainer.models import IGNORE_INDEX
from halfstep.trainer.models.causal_lm import LMBatch
from halfstep.trainer.models.pretrained import PretrainedTokenizer

Input: TypeAlias = Source | str
"""A text file or part of one, or an input of ``open_records``."""
ALPACA, CHAT, TEXT, COMPLETION = "alpaca", "chat", "text", "prompt-completion"
PLAIN, TOKENIZER = "plain", "tokenizer"
FIELDS: dict[str, tuple[str, ...]] = {
    CHAT: ("messages",),
    ALPACA: ("instruction", "output"),  # and perhaps input
    COMPLETION: ("prompt", "completion"),
    TEXT: ("text",),
}
"""Format to the fields that a record must have; the first that fits is taken.

**Source:** OpenAI's chats, Stanford Alpaca, TRL's prompt-completion.
"""
TEMPLATES = {CHAT: TOKENIZER, ALPACA: ALPACA, COMPLETION: PLAIN, TEXT: PLAIN}
"""Format to the template that writes its prompts."""
_MESSAGE = ("role", "content")
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
    begins: bool = False  # whether the tokenizer's bos precedes; chat templates write it themselves
    ends: bool = False  # whether the end-of-text id follows; it is learned if the text is


Document: TypeAlias = list[Part]


class Encoded(NamedTuple):
    """The token ids of a document, and which of them the loss counts."""

    ids: npt.NDArray[np.int32]  # (tokens,)
    learned: npt.NDArray[np.bool_]  # (tokens,), False at the first


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or several documents, in flat arrays."""

    ids: npt.NDArray[np.int32]  # (tokens,)
    targets: npt.NDArray[np.int32]  # (tokens,): the next token where it is learned, else -100
    positions: Indices  # (tokens,): place of each token in its document
    starts: Indices  # (rows + 1,): where each row begins, and the end of the last

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Indices:
        """How many tokens each row has."""
        return np.diff(self.starts)

    @property
    def learned_tokens(self) -> int:
        """Targets that count, in all rows."""
        return int(np.count_nonzero(self.targets != IGNORE_INDEX))

    @property
    def efficiency(self) -> float:
        """Share of tokens among all positions if every row were as long as the longest."""
        return len(self.ids) / (len(self) * int(self.lengths.max()))


@dataclass(frozen=True, slots=True)
class LMData:
    """Everything a language model is fine-tuned and evaluated on."""

    train_rows: Rows
    dev_rows: Rows
    template: str  # plain, alpaca or tokenizer; the prompt of generation needs the same
    sha256: str  # over all rows, so over every choice that made them
    notes: tuple[str, ...]  # what a user should know though nothing is wrong


def read_instructions(
    config: InstructionsConfig, tokenizer: PretrainedTokenizer, seed: int, *, packing: bool
) -> LMData:
    """Reads, writes out and tokenises everything that a language model learns from.

    With ``packing`` several documents share a row. The same files, configuration, tokenizer and
    seed give the same rows, whatever the paths.
    """
    train_inputs = find_inputs(config.train)
    dev_inputs = find_inputs(config.dev)
    if not dev_inputs and len(train_inputs) == 1 and isinstance(train_inputs[0], Source):
        # no other documents to draw from
        train_inputs, dev_inputs = split_corpus((train_inputs[0],), config.dev_fraction)
    writer = _Writer(tokenizer)
    train = encode_documents(writer.documents(train_inputs, "train"), tokenizer)
    if not writer.format:
        raise DataError("data.train holds no record; fill it or name another file")
    template = TEMPLATES[writer.format]
    notes = [f"format {writer.format} ({writer.origin}), template {template}"]
    if dev_inputs:
        dev = encode_documents(writer.documents(dev_inputs, "dev"), tokenizer)
    else:
        count = len(train)
        if count < 2:
            raise DataError(
                f"data.train: {count} document is too few to hold some out for evaluation; add "
                f"more, or give data.dev"
            )
        order = permutation("documents held out", seed, 0, count)
        share = held_out(count, config.dev_fraction)
        dev = [train[number] for number in np.sort(order[:share])]
        train = [train[number] for number in np.sort(order[share:])]
        notes.append(f"dev: {len(dev)} of {count} documents, drawn by the seed")
    train_rows, dev_rows = (
        _rows(name, part, writer.format == TEXT, config.max_length, packing, notes)
        for name, part in (("train", train), ("dev", dev))
    )
    digest = hashlib.sha256()
    for rows in (train_rows, dev_rows):
        documents = np.append(np.flatnonzero(rows.positions == 0), len(rows.ids))
        for values in (rows.ids, rows.targets, rows.starts, documents):
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(values.astype(values.dtype.newbyteorder("<")).data)
    sha256 = digest.hexdigest()
    return LMData(train_rows, dev_rows, template, sha256, tuple(notes))


def prompt_ids(prompt: str, tokenizer: PretrainedTokenizer, template: str) -> list[int]:
    """Encodes the user's words into exactly the ids that precede an answer in training.

    After them the model writes its answer, up to ``eos_id`` (or the chat template's own end-of-turn
    token). ``template`` is ``LMData.template`` of the training.
    """
    _refuse_control([prompt], tokenizer)
    document = prompt_parts(prompt, "", template, tokenizer)
    ids: list[int] = encode_documents([document], tokenizer)[0].ids.tolist()
    return ids


def _rows(
    name: str,
    documents: list[Encoded],
    text: bool,
    max_length: int,
    packing: bool,
    notes: list[str],
) -> Rows:
    fitted, happened = fit(documents, max_length, text=text)
    notes += [f"{name}: {note}" for note in happened]
    if not fitted:
        raise DataError(
            f"data.{name}: no document of {len(documents)} has a token to learn within "
            f"{max_length} tokens; raise max_length or give other records"
        )
    return pack(fitted, max_length, packing=packing)


def encode_documents(
    documents: Iterable[Document], tokenizer: PretrainedTokenizer
) -> list[Encoded]:
    """Encode documents, with the tokens of begin and end that their parts ask for."""
    parts = ((part, part is document[-1]) for document in documents for part in document)
    found: list[Encoded] = []
    end = tokenizer.end_of_text()
    ids, learned = array("i"), bytearray()
    for batch in in_batches(parts, lambda item: len(item[0].text)):
        encoded = tokenizer.encode_plain([part.text for part, _ in batch])
        for (part, last), tokens in zip(batch, encoded, strict=True):
            if part.begins and tokenizer.bos_id is not None:
                tokens = [tokenizer.bos_id, *tokens]
            if part.ends:
                tokens = [*tokens, end]
            ids.extend(tokens)
            learned.extend(bytes([part.learned]) * len(tokens))
            if last:
                found.append(Encoded(np.array(ids, np.int32), np.array(learned, np.bool_)))
                found[-1].learned[:1] = False
                ids, learned = array("i"), bytearray()
    return found


def _refuse_control(texts: Iterable[str], tokenizer: PretrainedTokenizer) -> None:
    """Refuses what the tokenizer would turn into a control token, such as the end of a text."""
    found = [word for text in texts for word in tokenizer.special_tokens if word and word in text]
    if found:
        raise DataError(
            f"a text holds {max(found, key=len)!r}, which the tokenizer would turn into a control "
            f"token; remove it (documents are separated by files or records)"
        )


def find_inputs(paths: tuple[str, ...]) -> tuple[Input, ...]:
    """Lists what paths, folders and names of datasets stand for, in the order given."""
    found: list[Input] = []
    for given in paths:
        if given.startswith(HUB_PREFIX):
            found.append(given)
            continue
        for source in find_sources((given,)):
            records = source.path.suffix.lower() in READERS
            found.append(str(source.path) if records else source)
    return tuple(found)


class _Writer:
    """Writes the records of inputs out, all in the format of the first one."""

    def __init__(self, tokenizer: PretrainedTokenizer) -> None:
        self.format = self.origin = ""  # until the first record is read
        self._tokenizer = tokenizer

    def documents(self, inputs: Iterable[Input], role: str) -> Iterator[Document]:
        """Yields documents; ``role``, ``train`` or ``dev``, is for the usual split of a dataset."""
        for given in inputs:
            records: Iterable[tuple[str, Any]]
            if isinstance(given, Source):
                text = tuple(piece.text for piece in read_pieces([given]))
                records = [(f"{given.path}:1", text)]
            else:
                records = open_records(given, role)
            for place, record in records:
                try:
                    document = self._document(record, place)
                except DataError as error:
                    raise DataError(f"{place}: {error}") from None
                yield document

    def _document(self, record: Any, place: str) -> Document:
        """Writes a record out; a tuple holds the pieces of a text file."""
        if isinstance(record, tuple):
            self._take_format(TEXT, place)
            return self._text(record)
        if not isinstance(record, dict):
            raise DataError(f"a JSON {type(record).__name__}, not an object; write {{...}}")
        record = {key.strip().casefold(): v for key, v in record.items() if v is not None}
        format = next((f for f, must in FIELDS.items() if record.keys() >= set(must)), "")
        if not format:
            found = ", ".join(map(repr, record)) or "none"
            allowed = "; or ".join(", ".join(must) for must in FIELDS.values())
            raise DataError(f"unknown fields: found {found:.200}; allowed: {allowed}; convert it")
        self._take_format(format, place)
        if format == CHAT:
            messages = _messages(record["messages"])
            _refuse_control([message["content"] for message in messages], self._tokenizer)
            return chat_parts(messages, self._tokenizer)
        values = [record[field] for field in FIELDS[format]]
        context = record.get("input", "") if format == ALPACA else ""
        for field, value in zip((*FIELDS[format], "input"), (*values, context), strict=True):
            if not isinstance(value, str) or (field != "input" and not value.strip()):
                raise DataError(f'"{field}" must be a text that is not empty, got {value!r:.50}')
        if format == TEXT:
            return self._text(values)
        _refuse_control([*values, context], self._tokenizer)
        prompt, answer = values
        asked = prompt_parts(prompt, context, TEMPLATES[format], self._tokenizer)
        return [*asked, Part(answer, True, ends=True)]

    def _text(self, pieces: Sequence[str]) -> Document:
        _refuse_control(pieces, self._tokenizer)
        last = len(pieces) - 1
        return [Part(piece, True, n == 0, n == last) for n, piece in enumerate(pieces)]

    def _take_format(self, format: str, place: str) -> None:
        if not self.format:
            self.format, self.origin = format, place
        elif format != self.format:
            raise DataError(
                f"records of two formats: {format} here, and {self.format} at {self.origin}; give "
                f"records of one"
            )


Messages: TypeAlias = list[dict[str, str]]


def _messages(value: Any) -> Messages:
    """Checks the messages of a conversation; which roles may follow each other, its template says.

    What follows the last answer is left out, as nothing is learned from it.
    """
    try:
        good = all(isinstance(message[field], str) for message in value for field in _MESSAGE)
    except (TypeError, LookupError):
        good = False
    if not good:
        raise DataError('"messages" must be a list of {"role": ..., "content": ...}, both strings')
    answers = [n for n, message in enumerate(value, 1) if message["role"] == "assistant"]
    if not answers:
        raise DataError("the conversation has no turn of the assistant to learn from; add one")
    messages: Messages = value[: answers[-1]]
    return messages


def prompt_parts(
    prompt: str, context: str, template: str, tokenizer: PretrainedTokenizer
) -> list[Part]:
    """Writes out what precedes an answer."""
    if template == TOKENIZER:
        return [Part(tokenizer.chat([{"role": "user", "content": prompt}], True), False)]
    if template == ALPACA:
        words = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
        prompt = words.format(prompt=prompt, context=context)
    return [Part(prompt, False, begins=True)]


def chat_parts(messages: Messages, tokenizer: PretrainedTokenizer) -> list[Part]:
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
        before = tokenizer.chat(messages[:number], True)
        after = tokenizer.chat(messages[: number + 1], False)
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


# From documents to rows and batches.


def fit(
    documents: Sequence[Encoded], max_length: int, *, text: bool
) -> tuple[list[Encoded], list[str]]:
    """Makes every document at most ``max_length`` tokens long, with something to learn.

    Plain text that is too long becomes several documents, each of which begins with the last token
    of the one before, so that every token but the first is learned exactly once. Of other documents
    the right end goes, and with it the end-of-text token; if only the prompt stays, all of it.
    Notes say so.
    """
    fitted = []
    for ids, learned in documents:
        # Windows of max_length tokens that overlap by one.
        for start in range(0, max(len(ids) - 1, 1), max_length - 1) if text else (0,):
            part = slice(start, start + max_length)
            here = learned[part].copy()
            here[:1] = False
            if here.any():
                fitted.append(Encoded(ids[part], here))
    notes = []
    if long := sum(len(ids) > max_length for ids, _ in documents):
        done = "cut into several" if text else "cut at the right"
        notes.append(f"{long} documents of more than {max_length} tokens were {done}")
    if not text and (less := len(documents) - len(fitted)):
        notes.append(f"{less} documents left out: no token to learn within max_length")
    return fitted, notes


def pack(documents: Sequence[Encoded], max_length: int, *, packing: bool) -> Rows:
    """Lays documents into rows of at most ``max_length`` tokens, each once and whole."""
    lengths = [len(ids) for ids, _ in documents]
    alone = [[number] for number in range(len(documents))]
    shared = best_fit_decreasing(lengths, max_length) if packing else alone
    order = list(chain.from_iterable(shared))
    ids = np.concatenate([documents[number].ids for number in order])
    positions = np.concatenate([np.arange(lengths[number]) for number in order])
    starts = np.cumsum([0, *(sum(lengths[n] for n in row) for row in shared)], dtype=np.int64)
    # The first token of a document is never learned, so nothing is a target across a border.
    follows = np.flatnonzero(np.concatenate([documents[number].learned for number in order]))
    targets = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    targets[follows - 1] = ids[follows]
    return Rows(ids, targets, positions, starts)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs lengths into bins: the longest first, each where it leaves the least room.

    ::

        for n in numbers, by length, longest first (ties: the smaller number first):
            bin = the bin with the least room that still holds lengths[n], else a new one
            (ties: the bin that came to this room last)

    These are at most 11/9 of the fewest bins possible, plus 4. Each length is at least 1 and at
    most ``capacity``.

    **Source:** Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional
    packing algorithms"; ``packing_strategy: bfd`` of TRL.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # sorted (room, -time it came to it, bin)
    for time, number in enumerate(sorted(range(len(lengths)), key=lambda n: -lengths[n])):
        at = bisect_left(rooms, (lengths[number],))
        if at == len(rooms):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, _, chosen = rooms.pop(at)
        bins[chosen].append(number)
        if left := room - lengths[number]:
            insort(rooms, (left, -time, chosen))
    return bins


def lm_batch(rows: Rows, indices: Sequence[int] | Indices, pad_id: int) -> LMBatch:
    """Builds the batch of some rows, padded on the right to the longest of them.

    Padding has no targets, so any ``pad_id`` will do. It is one more document: its positions too
    restart at 0.
    """
    numbers = np.asarray(indices, dtype=np.int64)
    ids_BT, mask_BT = padded(rows.ids, rows.starts, numbers, pad_id)
    targets_BT, _ = padded(rows.targets, rows.starts, numbers, IGNORE_INDEX)
    positions_BT, _ = padded(rows.positions, rows.starts, numbers, 0)
    padding_BT = ~mask_BT
    return ids_BT, targets_BT, positions_BT + (padding_BT.cumsum(1) - 1) * padding_BT
