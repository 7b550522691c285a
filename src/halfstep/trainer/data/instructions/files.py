"""Files of instructions become examples, each with its place for messages: ``file:line``.

A ``.jsonl`` file holds one object a line, a ``.json`` file a list of objects (or one a line), any
other text file is one document, as in ``documents.py``. What a record is shows in its fields, and
every field has to be one of those of its format: a field that nobody reads is a mistake in most
cases, and it changes what is learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.documents import BYTE_ORDER_MARK, Span, read_pieces
from halfstep.trainer.data.instructions.chat import Example, Pair, Text, read_messages
from halfstep.trainer.data.instructions.config import ALPACA, AUTO, CHAT, COMPLETION, TEXT
from halfstep.trainer.data.records import read_lines
from halfstep.trainer.data.sources import Source, unreadable

MAX_LIST_BYTES = 1 << 30
"""Largest ``.json`` list. It is parsed out of one string, so memory needs a limit."""

JSON = json.JSONDecoder()
LINES, LIST, DOCUMENT = "lines", "list", "document"

ASKED = "data.format"
"""Where a format comes from that the user gave by name."""

LINE_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".text")
"""Suffixes that are plain text; with ``format = "text"`` every suffix but those of JSON is."""

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
    """What ``auto`` takes it for."""
    accepted: tuple[str, ...]
    """Formats that may be asked for by name."""
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


class Record(NamedTuple):
    """An example and where it stands."""

    place: str
    """``file:line``, the line of its first character."""
    example: Example


class InstructionFiles:
    """The examples of files of one format, read anew at every iteration.

    Args:
        spans: Whole files, or parts of text files.
        format: One of ``FORMATS``; ``auto`` becomes the format of the first record.

    Attributes:
        format: The format, ``auto`` until the first record is read.
        origin: Where the format is from: ``data.format``, or the place of the first record.
        unused: Names of the fields that were left out so far.

    Raises:
        DataError: On iteration: a file cannot be read, is not JSON, or a record has other fields
            than its format, or a bad value. The message names file and line.
    """

    def __init__(self, spans: Iterable[Span], format: str = AUTO) -> None:
        self.spans = tuple(spans)
        self.format = format
        self.unused: set[str] = set()
        self.origin = "" if format == AUTO else ASKED

    def of_same_format(self, spans: Iterable[Span]) -> InstructionFiles:
        """Other files, which must have the format that these turned out to have."""
        others = InstructionFiles(spans, self.format)
        others.origin = self.origin
        return others

    def __iter__(self) -> Iterator[Record]:
        for span in self.spans:
            kind = file_kind(span.source, self.format)
            if kind == DOCUMENT:
                yield from self._documents(span)
            else:
                read = _lines if kind == LINES else _list
                for place, value in read(span.source):
                    yield Record(place, self._example(value, place))

    def _documents(self, span: Span) -> Iterator[Record]:
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
            yield Record(place, Text(pieces))

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
        fields = set(record)
        explicit = self.origin == ASKED
        if explicit:
            allowed = [shape for shape in SHAPES if self.format in shape.accepted]
        else:
            allowed = [shape for shape in SHAPES if self.format in (AUTO, shape.format)]
        matching = [shape for shape in allowed if fields.issuperset(shape.required)]
        if len(matching) != 1:
            what = "mixes the fields of several formats" if matching else "unknown fields"
            raise self._bad_fields(what, record, place, allowed)
        shape = matching[0]
        others = fields.difference(shape.required, shape.optional)
        left_out = others & (METADATA | KNOWN if explicit else METADATA)
        if others != left_out:
            known = others & KNOWN
            what = "mixes the fields of several formats" if known else "unknown fields"
            raise self._bad_fields(what, record, place, [shape])
        self.unused |= left_out
        if self.format == AUTO:
            self.format, self.origin = shape.format, place
        return shape

    def _bad_fields(
        self, what: str, record: dict[str, object], place: str, allowed: list[Shape]
    ) -> DataError:
        found = ", ".join(sorted(map(repr, record))[:8]) or "none"
        choices = "; or ".join(_fields(shape) for shape in allowed)
        why = f" (the format is {self.format}, from {self.origin})" if self.origin else ""
        return DataError(
            f"{place}: {what}: found {found}; allowed: {choices}{why}; rename or remove fields, or "
            f"give data.format"
        )


def file_kind(source: Source, format: str) -> str:
    """Tells how a file is read: ``lines`` or ``list`` of JSON, or one ``document``.

    Raises:
        DataError: The suffix is none of those that can be read, or the file cannot be.
    """
    suffix = source.path.suffix.lower()
    if suffix in LINE_SUFFIXES:
        return LINES
    if suffix == ".json":
        try:
            with open(source.path, "rb") as file:
                start = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
        except OSError as error:
            raise unreadable(source.path, error) from None
        return LINES if start.startswith(b"{") else LIST
    if source.kind == "bin" or (suffix not in TEXT_SUFFIXES and format != TEXT):
        raise DataError(
            f"{source.path}: instructions are read from .jsonl, .json and .txt files; convert it, "
            f"or give data.format = text if it is plain text"
        )
    return DOCUMENT


def _fields(shape: Shape) -> str:
    optional = f" (and {', '.join(shape.optional)})" if shape.optional else ""
    return ", ".join(shape.required) + optional


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


def _lines(source: Source) -> Iterator[tuple[str, object]]:
    """Yields (place, value) of every line that is not blank."""
    for number, line in read_lines(source.path):
        place = f"{source.path}:{number}"
        if line.strip():
            yield place, _parse(line.rstrip(), 0, place)[0]


def _list(source: Source) -> Iterator[tuple[str, object]]:
    """Yields (place, value) of every item of a JSON list, one parsed at a time."""
    if source.size > MAX_LIST_BYTES:
        raise DataError(
            f"{source.path}: {source.size} bytes are too many for a JSON list; write one object a "
            f"line into a .jsonl file"
        )
    try:
        raw = source.path.read_bytes()
    except OSError as error:
        raise unreadable(source.path, error) from None
    text = _decode(raw.removeprefix(BYTE_ORDER_MARK), str(source.path))
    line, seen, at = 1, 0, _skip(text, 0)
    if text[at : at + 1] != "[":
        raise DataError(f"{source.path}: must hold a JSON list of objects, or one object a line")
    at = _skip(text, at + 1)
    closed = text[at : at + 1] == "]"
    while not closed:
        line, seen = line + text.count("\n", seen, at), at
        place = f"{source.path}:{line}"
        value, at = _parse(text, at, place)
        yield place, value
        at = _skip(text, at)
        mark = text[at : at + 1]
        if mark not in (",", "]"):
            raise DataError(f"{place}: a comma or ] must follow this record; the list is damaged")
        closed = mark == "]"
        at = at if closed else _skip(text, at + 1)
    if text[at + 1 :].strip():
        raise DataError(f"{source.path}: something follows the JSON list; remove it")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _parse(text: str, at: int, place: str) -> tuple[object, int]:
    """Parses the value at ``at``; a line (at = 0) must hold nothing else."""
    try:
        return JSON.raw_decode(text, at) if at else (json.loads(text), len(text))
    except json.JSONDecodeError as error:
        why = f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, [[[[[...
        why = f"not usable JSON: {error}"
    raise DataError(f"{place}: {why}; write one object a line, or a .json list of objects")


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8: byte 0x{raw[error.start]:02x}; convert the file to UTF-8"
        ) from None
