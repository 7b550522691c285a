"""The names of classes, in the order of their ids: given as words, as a list, or as a table.

A label in the data is a name, or the id of one where the names are given and none of them is a
number. Ids run from 0 without a hole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import DataError
from halfstep.trainer.data.labelled.texts import NamedTexts, label_name
from halfstep.trainer.data.records import not_json, read_json_rows, read_lines

SHOWN = 20
"""Number of names that a message lists at most."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def shown(names: Iterable[str]) -> str:
    """Lists names for a message."""
    found = list(names)
    more = f", ... ({len(found)} in all)" if len(found) > SHOWN else ""
    return ", ".join(map(repr, found[:SHOWN])) + more


def is_integer(name: str) -> bool:
    """Tells whether a label is written as an integer."""
    return _INTEGER.fullmatch(name) is not None


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts by value if all names are integers, else by code point."""
    found = list(names)
    if all(map(is_integer, found)):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def read_names(given: str) -> tuple[str, ...]:
    """Reads names in the order of their ids.

    A ``.json`` file holds a list, or a table from name to id or from id to name; any other file one
    name a line, where blanks around a name, and blank lines, do not count.
    """
    path = Path(given).expanduser()
    if path.suffix.lower() == ".json":
        text = "".join(line for _, line in read_lines(path))
        if text.lstrip().startswith("{"):
            return _of_table(text, path)
        found = read_json_rows(path)
    else:
        found = ((f"{path}:{n}", line.strip()) for n, line in read_lines(path) if line.strip())
    seen: dict[str, str] = {}
    for place, value in found:
        name = label_name(value, place)
        if name in seen:
            where = f"stands here and at {seen[name]}"
            raise DataError(f"{place}: the name {name!r} {where}; remove one")
        seen[name] = place
    if not seen:
        raise DataError(f"{path}: no names; write one a line")
    return tuple(seen)


def _of_table(text: str, path: Path) -> tuple[str, ...]:
    """Reads ``{"name": id, ...}`` or ``{"id": "name", ...}``."""
    try:
        pairs = json.loads(text, object_pairs_hook=list)  # a dict would keep one of equal keys
    except (ValueError, RecursionError) as error:
        raise not_json(error, path, 1) from None
    if not pairs:
        raise DataError(f'{path}: no names; write {{"name": 0, "other name": 1, ...}}')
    if all(isinstance(value, str) for _, value in pairs):
        pairs = [(value, int(key) if _INTEGER.fullmatch(key) else key) for key, value in pairs]
    names: dict[int, str] = {}
    for key, value in pairs:
        name, place = label_name(key, f"{path}"), f"{path}: name {key!r}"
        if type(value) is not int:
            raise DataError(f"{place}: its id must be an integer, got {value!r:.60}")
        if name in names.values():
            raise DataError(f"{place} stands here more than once; remove one")
        if value in names:
            raise DataError(f"{place} and name {names[value]!r} have both the id {value}; give two")
        names[value] = name
    count = len(names)
    if missing := [n for n in range(count) if n not in names]:
        raise DataError(
            f"{path}: no name has the id {missing[0]}; {count} names need the ids 0 to {count - 1}"
        )
    return tuple(names[number] for number in range(count))


def numbers_of(named: NamedTexts, names: tuple[str, ...], why: str) -> dict[str, int]:
    """Maps the labels of texts to the numbers of their classes.

    Args:
        named: The texts and their labels, as the data have them.
        names: The classes, in the order of their numbers.
        why: How the message about an unknown label goes on after the label.

    Raises:
        DataError: For a label that is neither a name nor an id, and where some labels are names
            and others ids; the message gives the places.
    """
    known = {name: number for number, name in enumerate(names)}
    ids = not any(map(is_integer, names))
    numeric = [label for label in named.first if ids and is_integer(label)]
    if not numeric:
        _refuse_unknown(named.first, known, why, names)
        return known
    by_id = {label: int(label) for label in numeric}
    for label, number in by_id.items():
        if not 0 <= number < len(names):
            listed = ", ".join(f"{i} {name}" for i, name in enumerate(names[:SHOWN]))
            raise DataError(
                f"{named.first[label]}: no class has the id {label} (allowed: {listed}); correct "
                f"it, or name the class in the table of labels"
            )
    others = {label: place for label, place in named.first.items() if label not in by_id}
    _refuse_unknown(others, known, why, names)
    for label, place in others.items():
        raise DataError(
            f"{place}: the label {label!r} is a name, and {numeric[0]} at "
            f"{named.first[numeric[0]]} is an id; write all labels as names, or all as ids"
        )
    return by_id


def _refuse_unknown(
    labels: Mapping[str, str], known: Mapping[str, Any], why: str, names: tuple[str, ...]
) -> None:
    for label, where in labels.items():
        if label not in known:
            raise DataError(f"{where}: unknown label {label!r}: {why} (allowed: {shown(names)})")
