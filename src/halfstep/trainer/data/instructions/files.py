"""Inputs of instructions become examples, each with its place for messages.

Records come from every kind of file that ``records.py`` reads, and from datasets; any other text
file is one document. What a record is shows in its fields, and every field has to be one of those
of its format: a field that nobody reads is a mistake in most cases, and it changes what is learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.documents import Span, read_pieces, whole
from halfstep.trainer.data.hub_datasets import HUB_PREFIX
from halfstep.trainer.data.instructions.chat import Example, Pair, Text, read_messages
from halfstep.trainer.data.instructions.config import ALPACA, AUTO, CHAT, COMPLETION, TEXT
from halfstep.trainer.data.records import READERS, TABLE_SEPARATORS, open_records
from halfstep.trainer.data.sources import find_sources

Input: TypeAlias = Span | str
"""A document, or part of one; or what ``open_records`` opens."""

ASKED = "data.format"
"""Where a format comes from that the user gave by name."""

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


class PlacedExample(NamedTuple):
    """An example and where it stands."""

    place: str
    """``file:line``, the line of its first character; or ``dataset: row N``."""
    example: Example


def find_inputs(paths: tuple[str, ...], field: str, format: str) -> tuple[Input, ...]:
    """Lists what paths, globs, folders and names of datasets stand for, in the order given.

    Raises:
        DataError: Something is missing or empty, or has a suffix that is not read.
    """
    found: list[Input] = []
    for given in paths:
        if given.startswith(HUB_PREFIX):
            found.append(given)
            continue
        for source in find_sources((given,), field):
            suffix = source.path.suffix.lower()
            as_text = format == TEXT and source.kind != "bin"
            if suffix in READERS and not (as_text and suffix in TABLE_SEPARATORS):
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

    Args:
        inputs: What to read.
        format: One of ``FORMATS``; ``auto`` becomes the format of the first record.
        role: ``train`` or ``dev``, for the usual split of a dataset.

    Attributes:
        format: The format, ``auto`` until the first record is read.
        origin: Where the format is from: ``data.format``, or the place of the first record.
        unused: Names of the fields that were left out so far.

    Raises:
        DataError: On iteration: an input cannot be read, or a record has other fields than its
            format, or a bad value. The message names file and line.
    """

    def __init__(self, inputs: Iterable[Input], format: str = AUTO, role: str = "train") -> None:
        self.inputs = tuple(inputs)
        self.format = format
        self.role = role
        self.unused: set[str] = set()
        self.origin = "" if format == AUTO else ASKED

    def of_same_format(self, inputs: Iterable[Input], role: str = "dev") -> InstructionFiles:
        """Other inputs, which must have the format that these turned out to have."""
        others = InstructionFiles(inputs, self.format, role)
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
        fields = set(record)
        explicit = self.origin == ASKED
        if explicit:
            allowed = [shape for shape in SHAPES if self.format in shape.accepted]
        else:
            allowed = [shape for shape in SHAPES if self.format in (AUTO, shape.format)]
        matching = [shape for shape in allowed if fields.issuperset(shape.required)]
        others, left_out = fields, set[str]()
        if len(matching) == 1:
            (shape,) = allowed = matching
            others = fields.difference(shape.required, shape.optional)
            left_out = others & (METADATA | KNOWN if explicit else METADATA)
        if len(matching) != 1 or others != left_out:
            mixed = bool(others & KNOWN) if len(matching) == 1 else bool(matching)
            raise self._bad_fields(mixed, record, place, allowed)
        self.unused |= left_out
        if self.format == AUTO:
            self.format, self.origin = shape.format, place
        return shape

    def _bad_fields(
        self, mixed: bool, record: dict[str, object], place: str, allowed: list[Shape]
    ) -> DataError:
        what = "mixes the fields of several formats" if mixed else "unknown fields"
        found = ", ".join(sorted(map(repr, record))[:8]) or "none"
        choices = "; or ".join(
            ", ".join(shape.required)
            + (f" (and {', '.join(shape.optional)})" if shape.optional else "")
            for shape in allowed
        )
        why = f" (the format is {self.format}, from {self.origin})" if self.origin else ""
        return DataError(
            f"{place}: {what}: found {found}; allowed: {choices}{why}; rename or remove fields, or "
            f"give data.format"
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
