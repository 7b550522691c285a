"""Tables, JSON and datasets become records, one after the other, each with its place.

Text is read strictly as UTF-8, a byte order mark at the start is dropped, and only a line feed ends
a line. The readers of CSV and JSON in ``datasets`` do not serve: they shift fields, turn strings
into dates, and name no line (``docs/decisions/0015-reading-records.md``).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from halfstep.errors import DataError
from halfstep.trainer.data.hub_datasets import HUB_PREFIX, read_dataset
from halfstep.trainer.data.sources import inspect_file, read_chunks, unreadable

Record: TypeAlias = list[Any] | dict[str, Any]
Rows: TypeAlias = Iterator[tuple[str, Any]]
"""(place for messages, record): ``file:line`` where it begins, or ``dataset: row N``."""
Lines: TypeAlias = Iterable[tuple[int, str]]
"""(number from 1, line with its end)."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_RECORD_BYTES = 64 << 20
"""Longest line. JSON cannot be parsed in pieces, so memory needs a limit."""
MAX_LIST_BYTES = 1 << 30
"""Largest ``.json`` file. It is parsed out of one string, so memory needs a limit."""
TABLE_SUFFIXES = (".csv", ".tsv")


class Records(NamedTuple):
    """The records of one input, read as they are asked for."""

    name: str
    """The input, for messages."""
    rows: Rows
    header: tuple[str, ...] | None = None
    """Names of the columns of a table; None where there are none or objects name their own."""


def open_records(given: str, role: str, *, header: bool = True) -> Records:
    """Opens one input: a ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.parquet`` file, or a name.

    A name is ``datasets:NAME[/CONFIG][@SPLIT]``; ``role``, ``train``, ``dev`` or ``test``, decides
    the usual split of it. ``header`` is whether the first line of a table names the columns.

    Raises:
        ConfigError: ``datasets`` is needed and missing, or a name is malformed.
        DataError: The input is missing, empty, or of another kind; later, while records are asked
            for: one of them cannot be read. The message names the place.
    """
    path = Path(given).expanduser()
    suffix = path.suffix.lower()
    if given.startswith(HUB_PREFIX):
        return Records(given, read_dataset(given, role))
    if suffix not in READERS:
        hint = f"; a folder is {HUB_PREFIX}FOLDER" if path.is_dir() else ""
        raise DataError(
            f"{given}: records are read from {', '.join(READERS)} files and "
            f"{HUB_PREFIX}NAME, not from {suffix or 'names without suffix'}{hint}; convert or "
            f"rename it"
        )
    rows = READERS[suffix](path)
    if not header or suffix not in TABLE_SUFFIXES:
        return Records(str(path), rows)
    _, names = next(rows, ("", None))
    if names is None:
        raise DataError(f"{path}: only blank lines; the first line must name the columns")
    return Records(str(path), rows, tuple(names))


def read_lines(path: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number from 1 within the whole file, line with its end) of a file.

    ``start`` and ``stop`` are bytes at which a line begins or ends; None is the end of the file.

    Raises:
        DataError: The file is missing, empty or unreadable; a line is not UTF-8 or longer than
            ``MAX_RECORD_BYTES``.
    """
    source = inspect_file(path)
    if source.size == 0:
        raise DataError(f"{path}: the file is empty; fill it or leave it out")
    number = sum(chunk.count(b"\n") for chunk in read_chunks(source, 0, start))
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    why = f"longer than {MAX_RECORD_BYTES} bytes; split the record"
                    raise DataError(f"{path}:{number}: {why}")
                start += len(line)
                content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                yield number, _decode(content, f"{path}:{number}")
                if start == stop:
                    return
        if stop is not None:
            raise DataError(f"{path}:{number + 1}: the file ended while it was read")
    except OSError as error:
        raise unreadable(path, error) from None


def parse_objects(lines: Lines, name: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) for each line that is not blank, and refuses what is no object."""
    for number, line in lines:
        if line and not line.isspace():
            place = f"{name}:{number}"
            try:
                value = json.loads(line.rstrip("\r\n"))
            except (ValueError, RecursionError) as error:
                raise _not_json(error, name, number) from None
            if not isinstance(value, dict):
                kind = f"a JSON {type(value).__name__}, not an object"
                raise DataError(f'{place}: {kind}; write {{"text": ...}} on every line')
            yield place, value


def read_json(path: Path) -> Rows:
    """Reads items of a JSON list, of the list ``data`` of an object, or objects line by line."""
    size = inspect_file(path).size
    if size > MAX_LIST_BYTES:
        why = f"{size} bytes are too many for one JSON value"
        raise DataError(f"{path}: {why}; write one object a line into a .jsonl file")
    text = "".join(line for _, line in read_lines(path))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("{") or getattr(error, "msg", "") != "Extra data":
            raise _not_json(error, path, 1) from None
        yield from parse_objects(read_lines(path), path)
        return
    if isinstance(found, dict):
        found = found["data"] if isinstance(found.get("data"), list) else [found]
    if not isinstance(found, list):
        raise DataError(f"{path}: must hold a JSON list of objects, or one object a line")
    for number, item in enumerate(found, 1):
        yield f"{path}: item {number}", item


def is_text(string: str) -> bool:
    """Tells whether a string can be written as UTF-8: it holds no half of a surrogate pair."""
    try:
        string.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _table(path: Path, separator: str) -> Rows:
    """Yields rows with the place where they begin; blank lines are left out.

    Quoted fields may hold separators, quotes ("") and line ends.
    """
    lines = (line for _, line in read_lines(path))
    # strict: without it, a quote that is never closed swallows the rest of the file.
    reader = csv.reader(lines, delimiter=separator, strict=True)
    width = None
    while True:
        place = f"{path}:{reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{place}: the fields of the row that begins here cannot be told apart: {error}; "
                f'close every quote, write quotes within a quoted field twice (""), or use .jsonl'
            ) from None
        if row is None:
            return
        if not row:
            continue
        width = width or len(row)
        if len(row) != width:
            raise DataError(
                f"{place}: {len(row)} fields where the first line has {width}; put quotes around a "
                f"field that holds the separator or a line end"
            )
        yield place, row


def _not_json(error: Exception, name: Path | str, number: int) -> DataError:
    """Words why text from a line on is no JSON; returns the error for the caller to raise."""
    why = f"not usable JSON: {error}"  # a number of 5,000 digits, [[[[[...
    if isinstance(error, json.JSONDecodeError):
        number += error.lineno - 1
        why = f"not JSON: {error.msg} at column {error.colno}"
    return DataError(f"{name}:{number}: {why}; write one object a line, or a .json list of objects")


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the "
            f"line; convert the file to UTF-8"
        ) from None


READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": lambda path: _table(path, ","),
    ".tsv": lambda path: _table(path, "\t"),
    ".jsonl": lambda path: parse_objects(read_lines(path), path),
    ".ndjson": lambda path: parse_objects(read_lines(path), path),
    ".json": lambda path: read_json(path),
    ".parquet": lambda path: read_dataset(str(inspect_file(path).path), "train"),
}
"""How a file is read, by its suffix. A format is added by its line here."""
