"""Tables and lists of objects become records, one after the other, each with its place.

A record is a list (a row of a table, or a JSON list) or a dict (a JSON object). Everything is read
strictly as UTF-8, a byte order mark at the start is dropped, and only a line feed ends a line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from halfstep.errors import DataError
from halfstep.trainer.data.corpus.documents import BYTE_ORDER_MARK, MAX_RECORD_BYTES
from halfstep.trainer.data.sources import inspect_file, unreadable

Record: TypeAlias = list[Any] | dict[str, Any]

TABLE_SEPARATORS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one input, read as they are asked for."""

    name: str
    """The input, for messages."""
    rows: Iterator[tuple[int, Record]]
    """(number, record); the number is that of the line, row or list item, counted from 1."""
    header: tuple[str, ...] | None = None
    """Names of the columns of a table; None where there are none or objects name their own."""
    unit: str = "line"
    """What the numbers count: ``line``, ``item`` or ``row``."""

    def at(self, number: int) -> str:
        """Words a place, as every message begins."""
        return (
            f"{self.name}:{number}" if self.unit == "line" else f"{self.name}: {self.unit} {number}"
        )


def check_file(path: Path) -> None:
    """Makes sure that a path is a regular file with something in it.

    Raises:
        DataError: It is not.
    """
    if inspect_file(path).size == 0:
        raise DataError(f"{path}: the file is empty; fill it or leave it out")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line with its end).

    Raises:
        DataError: A line is not UTF-8 or longer than ``MAX_RECORD_BYTES``, or the file cannot be
            read.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{path}:{number}: longer than {MAX_RECORD_BYTES} bytes; split the record"
                    )
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                yield number, _decode(line, path, number)
    except OSError as error:
        raise unreadable(path, error) from None


def read_table(path: Path, *, header: bool) -> Records:
    """Reads a CSV or TSV file: quoted fields may hold separators, quotes ("") and line ends.

    Args:
        path: A file whose suffix is in ``TABLE_SEPARATORS``.
        header: Whether the first line names the columns.

    Returns:
        Rows that all have as many fields as the first line.

    Raises:
        DataError: The file is empty; later, while rows are asked for: a row has another number of
            fields, or its quotes do not match.
    """
    check_file(path)
    rows = _table_rows(path, TABLE_SEPARATORS[path.suffix.lower()])
    if not header:
        return Records(str(path), _even(rows, path, None))
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: only blank lines; the first line must name the columns")
    return Records(str(path), _even(rows, path, len(first[1])), header=tuple(first[1]))


def read_jsonl(path: Path) -> Records:
    """Reads a file of one JSON object a line; blank lines are left out.

    Raises:
        DataError: The file is empty; later, while rows are asked for: a line is no JSON object.
    """
    check_file(path)
    return Records(str(path), parse_objects(read_lines(path), str(path)))


def read_json(path: Path) -> Records:
    """Reads a JSON list of lists or of objects, or such a list as ``data`` of an object.

    Raises:
        DataError: It is something else.
    """
    check_file(path)
    found = load_json(path)
    if isinstance(found, dict):
        if "data" not in found:
            keys = ", ".join(sorted(found)[:5]) or "none"
            raise DataError(f'{path}: a JSON object without "data" (keys here: {keys}); {_FORMS}')
        found = found["data"]
    if not isinstance(found, list):
        raise DataError(f"{path}: a JSON {type(found).__name__} where a list is needed; {_FORMS}")
    items = Records(str(path), iter(()), unit="item")
    for number, item in enumerate(found, 1):
        if not isinstance(item, list | dict):
            kind = type(item).__name__
            raise DataError(f"{items.at(number)}: a JSON {kind}, neither list nor object; {_FORMS}")
    return Records(str(path), iter(enumerate(found, 1)), unit="item")


def load_json(path: Path) -> Any:
    """Reads a whole JSON file.

    Raises:
        DataError: It is not UTF-8, not JSON, or cannot be read.
    """
    text = "".join(line for _, line in read_lines(path))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}; one object a "
            f"line is .jsonl"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not usable JSON: {error}") from None


def parse_objects(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[int, Record]]:
    """Yields (number, object) for each line that is not blank.

    Raises:
        DataError: A line is no JSON object.
    """
    for number, line in lines:
        if line.isspace() or not line:
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}:{number}: not JSON: {error.msg} at column {error.colno}; write one object "
                f"a line"
            ) from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, [[[[[...
            raise DataError(f"{name}:{number}: not usable JSON: {error}") from None
        if not isinstance(found, dict):
            raise DataError(
                f"{name}:{number}: a JSON {type(found).__name__}, not an object; write "
                f'{{"text": ...}} on every line'
            )
        yield number, found


_FORMS = 'write [["text", "label"], ...], [{"text": ..., "label": ...}, ...] or {"data": [...]}'


def _table_rows(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of the line where the row begins, fields); blank lines are left out."""
    lines = (line for _, line in read_lines(path))
    # strict: without it, a quote that is never closed swallows the rest of the file.
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{number}: the fields of the row that begins here cannot be told apart: "
                f'{error}; close every quote, write quotes within a quoted field twice (""), or '
                f"use .jsonl"
            ) from None
        if row is None:
            return
        if row:
            yield number, row


def _even(
    rows: Iterator[tuple[int, list[str]]], path: Path, width: int | None
) -> Iterator[tuple[int, Record]]:
    for number, row in rows:
        width = len(row) if width is None else width
        if len(row) != width:
            raise DataError(
                f"{path}:{number}: {len(row)} fields where the first line has {width}; put quotes "
                f"around a field that holds the separator or a line end"
            )
        yield number, row


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1} "
            f"of the line; convert the file to UTF-8"
        ) from None
