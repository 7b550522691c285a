"""The names of the classes: given in a list or a file, or found in the data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from halfstep.data.labelled_config import LabelledConfig
from halfstep.data.labelled_files import NamedTexts, label_name
from halfstep.data.records import check_file, load_json, read_lines
from halfstep.errors import DataError

SHOWN = 20
"""Names listed in a message."""


def class_names(config: LabelledConfig, train: NamedTexts) -> tuple[str, ...]:
    """Settles the names and their order, and makes sure that the training texts fit them.

    Names that are found are sorted by code point, or by value if all are integers.

    Returns:
        At least two different names, each the label of a training text.

    Raises:
        DataError: The file of names is unusable, the texts have a label that is not in the list, a
            listed class has no text, or there is one class only.
    """
    listed = config.labels or (read_names(config.labels_file) if config.labels_file else ())
    found = set(train.labels)
    names = tuple(listed) or sorted_names(found)
    if listed:
        where = config.labels_file or "data.labels"
        check_known(train, names, f"{where} lacks it; add it there, or correct the text's label")
        if absent := [name for name in names if name not in found]:
            raise DataError(
                f"{where}: no training text has the label {shown(absent)}, so that class would "
                f"never be learned; add texts or remove the name"
            )
    if len(names) < 2:
        raise DataError(
            f"data.train: every text has the label {names[0]!r}; a classifier needs at least two "
            f"classes: add texts of another, or check the column (--label-column)"
        )
    return names


def check_known(named: NamedTexts, names: tuple[str, ...], why: str) -> None:
    """Makes sure that every label is in a list.

    Args:
        named: Texts and labels.
        names: The list.
        why: How the message goes on after the label.

    Raises:
        DataError: A label is not; the message tells where it stands first, and what is allowed.
    """
    allowed = set(names)
    for name, where in named.first.items():
        if name not in allowed:
            raise DataError(f"{where}: unknown label {name!r}: {why} (allowed: {shown(names)})")


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts by value if all names are integers, else by code point."""
    found = list(names)
    if all(re.fullmatch(r"[+-]?[0-9]{1,18}", name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def read_names(given: str) -> tuple[str, ...]:
    """Reads names in order: one a line, or a JSON list in a ``.json`` file.

    Blanks around a name on a line, and blank lines, do not count.

    Raises:
        DataError: The file cannot be read, holds a name twice, or no name.
    """
    path = Path(given).expanduser()
    check_file(path)
    if path.suffix.lower() == ".json":
        found = load_json(path)
        if not isinstance(found, list):
            kind = type(found).__name__
            raise DataError(f'{path}: a JSON {kind}, not a list; write ["name", "name", ...]')
        unit, numbered = f"{path}: item ", list(enumerate(found, 1))
    else:
        unit = f"{path}:"
        numbered = [(n, line.strip()) for n, line in read_lines(path) if line.strip()]
    seen: dict[str, int] = {}
    for number, value in numbered:
        try:
            name = label_name(value)
        except ValueError as error:
            raise DataError(f"{unit}{number}: {error}") from None
        if name in seen:
            raise DataError(
                f"{unit}{number}: the name {name!r} stands here and at {seen[name]}; remove one"
            )
        seen[name] = number
    if not seen:
        raise DataError(f"{path}: no names; write one a line")
    return tuple(seen)


def look_alikes(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Groups names that differ only in case or in blanks around them."""
    count = Counter(map(_plain, names))
    return [
        tuple(name for name in names if _plain(name) == plain)
        for plain, times in count.items()
        if times > 1
    ]


def shown(names: Iterable[str]) -> str:
    """Lists names for a message, not more than ``SHOWN``."""
    found = list(names)
    more = f", ... ({len(found)} in all)" if len(found) > SHOWN else ""
    return ", ".join(map(repr, found[:SHOWN])) + more


def _plain(name: str) -> str:
    return name.strip().casefold()
