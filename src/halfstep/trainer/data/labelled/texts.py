"""Reads texts, and their labels where they have some, checking each with its place for errors.

Columns are found by their usual names, or by the name or number that the user gives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.config import LabelledConfig, check_column, column_number
from halfstep.trainer.data.records import (
    Record,
    Records,
    is_text,
    open_records,
    parse_objects,
    read_lines,
)
from halfstep.words import Told

_told = Told("halfstep.trainer.data")

TEXT_COLUMNS = ("text", "sentence", "content", "review", "tweet", "post", "文本", "内容")
LABEL_COLUMNS = ("label", "labels", "category", "emotion", "class", "target", "标签", "类别")

STREAM = "standard input"

_CJK = (
    "\u2014\u2026"  # dash and ellipsis
    "\u3001-\u303f"  # punctuation, but for the ideographic space
    "\u3040-\u30ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f"  # full-width punctuation
)
_BETWEEN = re.compile(rf"(?<=[{_CJK}])[ \t\u3000]+(?=[{_CJK}])")


class Column(NamedTuple):
    """A column to look for in the records."""

    what: str
    """``text`` or ``label``, as in the option ``--text-column``."""
    given: str
    """Name or number given by the user; empty means: look for a usual name."""
    usual: tuple[str, ...]
    has_option: bool = True
    """Whether the command has ``--text-column`` and ``--label-column``."""

    @property
    def remedy(self) -> str:
        """What to do where no column, or more than one, could be the wanted one."""
        if self.has_option:
            return _told("give_column", option=f"--{self.what}-column")
        return _told("rename_column", name=repr(self.what))


@dataclass(slots=True)
class NamedTexts:
    """Texts with the names of their labels, from one or several inputs."""

    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    """Label to the place where it first occurs, for messages."""
    dropped: int = 0
    """Number of empty texts that were left out."""
    segmented: int = 0
    """Number of texts that have blanks between Chinese words."""


def read_named(
    inputs: tuple[str, ...], config: LabelledConfig, role: str, *, has_options: bool = True
) -> NamedTexts:
    """Reads all inputs of one role, ``train``, ``dev`` or ``test``, in order.

    There is at least one text; texts are UTF-8 and not blank. ``has_options`` is whether the
    command has ``--text-column`` and ``--label-column``, for the message.

    Raises:
        DataError: An input cannot be read, or a text or a label in it cannot be used; the message
            names the place.
    """
    found = NamedTexts()
    columns = (
        Column("text", config.text_column, TEXT_COLUMNS, has_options),
        Column("label", config.label_column, LABEL_COLUMNS, has_options),
    )
    header = all(column_number(column.given) is None for column in columns)
    most = config.limit if role == "train" and config.limit else None
    for given in inputs:
        first_empty, empty = "", 0
        for place, (text, value) in _values(open_records(given, role, header=header), columns):
            if len(found.texts) == most:
                break
            _check_text(text, place)
            label = sys.intern(label_name(value, place))  # one object for all texts of a class
            if not text or text.isspace():
                first_empty, empty = first_empty or place, empty + 1
                continue
            joined = join_words(text)
            found.segmented += joined != text
            found.first.setdefault(label, place)
            found.texts.append(joined if config.join_words else text)
            found.labels.append(label)
        if empty and not config.drop_empty:
            raise DataError(
                f"{first_empty}: the text is empty, and so are {empty} in all in this input; "
                f"remove them, or leave them out with --data.drop_empty true (evaluate: "
                f"--drop-empty)"
            )
        found.dropped += empty
    if not found.texts:
        dropped = f" (all {found.dropped} are empty)" if found.dropped else ""
        raise DataError(f"{role}: no texts in {', '.join(inputs)}{dropped}; add some")
    return found


def read_texts(source: Path | TextIO, text_column: str = "") -> Iterator[tuple[int, str]]:
    """Yields (number of the record from 1, text) as the texts are asked for.

    The source is a file of records, a ``.txt`` file (one text a line), or an open stream: JSONL if
    its first line that is not blank begins a JSON object, else one text a line. The column is named
    or numbered as in ``LabelledConfig``.

    Raises:
        DataError: Something cannot be read, or a text is empty; the message names the line.
    """
    check_column("text_column", text_column)
    if not isinstance(source, Path):
        records = _open_stream(source)
    elif source.suffix.lower() == ".txt":
        records = _plain(read_lines(source), str(source))
    else:
        records = open_records(str(source), "test", header=column_number(text_column) is None)
    return _texts(records, Column("text", text_column, TEXT_COLUMNS))


def join_words(text: str) -> str:
    """Removes blanks between Chinese or Japanese characters; Korean and Latin words keep theirs."""
    return _BETWEEN.sub("", text)


def label_name(value: Any, place: str) -> str:
    """Turns the label at a place into a name: strings as they are, 3 into "3", true into "true"."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{place}: the label is empty; give every text a label")
        if not is_text(value):
            raise DataError(
                f"{place}: the label holds half a surrogate pair (\\ud800 to \\udfff); mend it"
            )
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    kind = "null" if value is None else type(value).__name__
    raise DataError(f"{place}: the label must be a string, an integer or a boolean, got {kind}")


def _texts(records: Records, column: Column) -> Iterator[tuple[int, str]]:
    for count, (place, (text,)) in enumerate(_values(records, (column,)), 1):
        _check_text(text, place)
        if not text or text.isspace():
            raise DataError(f"{place}: the text is empty, so nothing can be predicted; remove it")
        yield count, text


def _check_text(text: object, place: str) -> None:
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise DataError(f"{place}: the text must be a string, got {kind}")
    if not is_text(text):
        raise DataError(
            f"{place}: the text holds half a surrogate pair, or bytes that are not UTF-8; mend it"
        )


def _open_stream(stream: TextIO) -> Records:
    lines = _stream_lines(stream)
    seen: list[tuple[int, str]] = []
    for number, line in lines:
        seen.append((number, line))
        if line.strip():
            break
    together = chain(seen, lines)
    if seen and seen[-1][1].lstrip().startswith("{"):
        return Records(STREAM, parse_objects(together, STREAM))
    return _plain(together, STREAM)


def _stream_lines(stream: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        while line := stream.readline():
            number += 1
            yield number, line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeDecodeError as error:
        raise DataError(
            f"{STREAM}: not UTF-8 after line {number}: {error.reason}; convert it to UTF-8"
        ) from None


def _plain(lines: Iterator[tuple[int, str]] | chain[tuple[int, str]], name: str) -> Records:
    return Records(
        name, ((f"{name}:{n}", [line.removesuffix("\n").removesuffix("\r")]) for n, line in lines)
    )


def _values(records: Records, columns: tuple[Column, ...]) -> Iterator[tuple[str, list[Any]]]:
    """Yields (place, values of the wanted columns) of every record; all lists, or all objects."""
    first = next(records.rows, None)
    if first is None:
        return
    keys = _keys(records, *first, columns)
    kind, width = type(first[1]), len(first[1])
    for place, record in chain([first], records.rows):
        if type(record) is not kind:
            raise DataError(f"{place}: a list among objects, or an object among lists; write alike")
        if kind is list and len(record) != width:
            raise DataError(f"{place}: {len(record)} values where the first has {width}; mend it")
        try:
            yield place, [record[key] for key in keys]
        except KeyError as error:
            listed = ", ".join(sorted(record)[:5]) or "none"
            raise DataError(
                f"{place}: no field {error.args[0]!r}, which the first record has (fields here: "
                f"{listed}); add it"
            ) from None


def _keys(records: Records, place: str, record: Record, columns: tuple[Column, ...]) -> list[Any]:
    """Finds the places in a list, or the fields of an object, that hold the wanted columns."""
    if isinstance(record, dict):
        return _by_name(place, tuple(record), columns, table=False)
    if not isinstance(record, list):
        raise DataError(
            f"{place}: a JSON {type(record).__name__}, neither list nor object; write "
            f'[["text", "label"], ...] or [{{"text": ..., "label": ...}}, ...]'
        )
    if records.header is None:
        return _by_number(place, record, columns)
    names = _by_name(f"{records.name}:1", records.header, columns, table=True)
    return [records.header.index(name) for name in names]


def _by_name(
    where: str, names: tuple[str, ...], columns: tuple[Column, ...], *, table: bool
) -> list[str]:
    keys: list[str] = []
    for column in columns:
        what, given, usual, _ = column
        found = [n for n in names if n == given or (not given and n.strip().casefold() in usual)]
        if len(found) == 1 and found[0] not in keys:
            keys.append(found[0])
            continue
        listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        if len(found) > 1:
            same = "the same name" if len(set(found)) == 1 else " and ".join(map(repr, found))
            why = f"several columns could hold the {what} ({same}; columns here: {listed})"
            raise DataError(f"{where}: {why}; {column.remedy}")
        known = {
            "where": where,
            "columns": listed or _told("no_columns"),
            "remedy": column.remedy + (_table_hint(names, column) if table else ""),
        }
        if given:
            raise DataError(_told("no_column", name=repr(given), **known))
        raise DataError(_told("no_usual_column", what=_told(f"what {what}"), **known))
    return keys


def _table_hint(names: tuple[str, ...], column: Column) -> str:
    if len(names) == 1:
        signs = {";": "';'", "\t": _told("tabs"), ",": _told("commas"), "|": "'|'"}
        for separator, sign in signs.items():
            if separator in names[0]:
                return _told("separated", sign=sign)
    return _told("or_number") if column.has_option else ""


def _by_number(place: str, record: list[Any], columns: tuple[Column, ...]) -> list[int]:
    """Takes columns of lists without names: the given numbers, or all there are in order."""
    keys: list[int] = []
    for order, column in enumerate(columns, 1):
        flag = f"--{column.what}-column"
        number = column_number(column.given) if column.given else order
        if number is None:
            why = f"lists have no column {column.given!r}; leave {flag} out or give a number"
            raise DataError(f"{place}: {why} (from 1)")
        # a text to predict may still have its label behind it, as a pair to train on has
        if not column.given and len(record) not in (len(columns), 2):
            why = f"{len(record)} values where {len(columns)} are needed"
            raise DataError(f"{place}: {why}; give the number (from 1) of {flag}")
        if number > len(record):
            why = f"{flag} {number}, but there are {len(record)} columns"
            raise DataError(f"{place}: {why}; give a smaller number")
        keys.append(number - 1)
    if len(set(keys)) < len(keys):
        raise DataError(f"{place}: text and label are one column; give both numbers")
    cells = [record[key] for key in keys]
    if all(
        column.given and isinstance(cell, str) and cell.strip().casefold() in column.usual
        for column, cell in zip(columns, cells, strict=True)
    ):
        raise DataError(
            f"{place}: looks like a header ({', '.join(map(repr, cells))}); give the columns by "
            f"name instead of number"
        )
    return keys
