"""Finds the columns of text and label by the names that people give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.config import column_number
from halfstep.trainer.data.records import Record, Records

TEXT_COLUMNS = ("text", "sentence", "content", "review", "tweet", "post")
LABEL_COLUMNS = ("label", "labels", "category", "emotion", "class", "target")

Key: TypeAlias = int | str
"""Place in a list, counted from 0, or field of an object."""

Wanted: TypeAlias = tuple[str, str, tuple[str, ...]]
"""(option for messages, column that was given or "", usual names)."""


def wanted_text(column: str) -> Wanted:
    """Asks for the text."""
    return ("text_column", column, TEXT_COLUMNS)


def wanted_label(column: str) -> Wanted:
    """Asks for the label."""
    return ("label_column", column, LABEL_COLUMNS)


def fields(records: Records, wanted: Sequence[Wanted]) -> Iterator[tuple[int, list[Any]]]:
    """Yields (number, values of the wanted columns) of every record.

    Args:
        records: All lists or all objects.
        wanted: The columns, in the order in which the values are to come.

    Raises:
        DataError: A column is missing or ambiguous, in the header or in a record.
    """
    first = next(records.rows, None)
    if first is None:
        return
    keys = _keys(records, first, wanted)
    kind, width = type(first[1]), len(first[1])
    for number, record in chain([first], records.rows):
        if type(record) is not kind:
            raise DataError(
                f"{records.at(number)}: a list among objects, or an object among lists; write all "
                f"of them alike"
            )
        if kind is list and len(record) != width:
            raise DataError(
                f"{records.at(number)}: {len(record)} values where the first has {width}; write "
                f"all of them alike"
            )
        try:
            yield number, [record[key] for key in keys]  # type: ignore[index]
        except KeyError as error:
            listed = ", ".join(sorted(record)[:5]) or "none"
            raise DataError(
                f"{records.at(number)}: no field {error.args[0]!r}, which the first record has "
                f"(fields here: {listed}); add it"
            ) from None


def _keys(records: Records, first: tuple[int, Record], wanted: Sequence[Wanted]) -> list[Key]:
    number, record = first
    if isinstance(record, dict):
        return _by_name(records.at(number), tuple(record), wanted, table=False)
    if records.header is not None:
        names = records.header
        chosen = _by_name(f"{records.name}:1", names, wanted, table=True)
        return [names.index(str(name)) for name in chosen]
    return _by_number(records, number, record, wanted)


def _by_name(
    where: str, names: tuple[str, ...], wanted: Sequence[Wanted], *, table: bool
) -> list[Key]:
    keys: list[Key] = []
    for option, given, usual in wanted:
        what, flag = option.split("_")[0], _flag(option)
        found = [n for n in names if n == given or (not given and n.strip().casefold() in usual)]
        if len(found) == 1 and found[0] not in keys:
            keys.append(found[0])
            continue
        columns = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        listed = f"columns here: {columns or 'none'}"
        if len(found) > 1:
            same = "the same name" if len(set(found)) == 1 else " and ".join(map(repr, found))
            raise DataError(
                f"{where}: several columns could hold the {what} ({same}; {listed}); give "
                f"{flag} NAME"
            )
        missing = f"no column {given!r}" if given else f"no column that usually holds the {what}"
        raise DataError(
            f"{where}: {missing} ({listed}); give {flag} NAME"
            + (_table_hint(names) if table else "")
        )
    return keys


def _table_hint(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        for separator, word in ((";", "';'"), ("\t", "tabs"), (",", "commas"), ("|", "'|'")):
            if separator in names[0]:
                return f"; the fields seem to be separated by {word}: save with commas as .csv"
    return ", or its number (from 1) where the table has no header"


def _by_number(
    records: Records, number: int, record: list[Any], wanted: Sequence[Wanted]
) -> list[Key]:
    """Takes columns of lists without names: the given numbers, or all there are in order."""
    keys: list[Key] = []
    for place, (option, given, _) in enumerate(wanted, 1):
        flag = _flag(option)
        column = column_number(given) if given else place
        if column is None:
            raise DataError(
                f"{records.at(number)}: lists have no column {given!r}; leave "
                f"{flag} out or give a number (from 1)"
            )
        if not given and len(record) != len(wanted):
            raise DataError(
                f"{records.at(number)}: {len(record)} values where {len(wanted)} are needed; give "
                f"the number (from 1) of {flag}"
            )
        if column > len(record):
            raise DataError(
                f"{records.at(number)}: {flag} {column}, but "
                f"there are {len(record)} columns; give a smaller number"
            )
        keys.append(column - 1)
    if len(set(keys)) < len(keys):
        raise DataError(f"{records.at(number)}: text and label are one column; give both numbers")
    usual = [names for _, _, names in wanted]
    cells = [record[int(key)] for key in keys]
    if all(given for _, given, _ in wanted) and all(
        isinstance(cell, str) and cell.strip().casefold() in names
        for cell, names in zip(cells, usual, strict=True)
    ):
        raise DataError(
            f"{records.at(number)}: looks like a header ({', '.join(map(repr, cells))}); give the "
            f"columns by name instead of number"
        )
    return keys


def _flag(option: str) -> str:
    """The option of the command line that sets a column."""
    return f"--{option.replace('_', '-')}"
