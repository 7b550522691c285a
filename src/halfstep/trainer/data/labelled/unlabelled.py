"""Texts to predict: read one by one, never all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.columns import fields, wanted_text
from halfstep.trainer.data.labelled.config import check_column, column_number
from halfstep.trainer.data.labelled.files import is_text
from halfstep.trainer.data.records import (
    TABLE_SEPARATORS,
    Record,
    Records,
    check_file,
    parse_objects,
    read_jsonl,
    read_lines,
    read_table,
)

SUFFIXES = (*TABLE_SEPARATORS, ".jsonl", ".txt")
STREAM = "standard input"


def read_texts(source: Path | TextIO, text_column: str = "") -> Iterator[tuple[int, str]]:
    """Yields (number of the record from 1, text) as the texts are asked for.

    Args:
        source: A .csv, .tsv, .jsonl or .txt file (one text a line), or an open stream: JSONL if its
            first line that is not blank begins a JSON object, else one text a line.
        text_column: Name of the column, or its number (from 1) in a table without header; empty
            means: look for a usual name.

    Yields:
        Texts that are not blank, without the line end.

    Raises:
        ConfigError: ``text_column`` is 0.
        DataError: Something cannot be read, or a text is empty; the message names the line.
    """
    check_column("text_column", text_column)
    if isinstance(source, Path):
        return _texts(_open_file(source, text_column), text_column)
    return _texts(_open_stream(source), text_column)


def _texts(records: Records, text_column: str) -> Iterator[tuple[int, str]]:
    found = fields(records, [wanted_text(text_column)])
    for count, (number, (text,)) in enumerate(found, 1):
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise DataError(f"{records.at(number)}: the text must be a string, got {kind}")
        if not text or text.isspace():
            raise DataError(
                f"{records.at(number)}: the text is empty, so there is nothing to predict; remove "
                f"it"
            )
        if not is_text(text):
            raise DataError(
                f"{records.at(number)}: the text holds half a surrogate pair, or bytes that are "
                f"not UTF-8; mend it"
            )
        yield count, text


def _open_file(path: Path, text_column: str) -> Records:
    suffix = path.suffix.lower()
    if suffix in TABLE_SEPARATORS:
        return read_table(path, header=column_number(text_column) is None)
    if suffix == ".jsonl":
        return read_jsonl(path)
    if suffix == ".txt":
        check_file(path)
        return Records(str(path), _plain(read_lines(path)))
    raise DataError(
        f"{path}: texts to predict are read from {', '.join(SUFFIXES)} files, not from "
        f"{suffix or 'names without suffix'}; convert or rename it, or send it to {STREAM} (-)"
    )


def _open_stream(stream: TextIO) -> Records:
    lines = _stream_lines(stream)
    blank: list[tuple[int, str]] = []
    for number, line in lines:
        blank.append((number, line))
        if line.strip():
            break
    together = chain(blank, lines)
    if blank and blank[-1][1].lstrip().startswith("{"):
        return Records(STREAM, parse_objects(together, STREAM))
    return Records(STREAM, _plain(together))


def _stream_lines(stream: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        try:
            line = stream.readline()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{STREAM}: not UTF-8 after line {number}: {error.reason}; convert it to UTF-8"
            ) from None
        if not line:
            return
        number += 1
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def _plain(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Record]]:
    for number, line in lines:
        yield number, [line.removesuffix("\n").removesuffix("\r")]
