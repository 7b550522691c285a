"""Reads labelled texts for a classifier, each with its place for errors, and splits them."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.batches import permutation
from halfstep.trainer.data.config import (
    LabelledConfig,
    LabelledData,
    LabelledTexts,
)
from halfstep.trainer.data.corpus import held_out
from halfstep.trainer.data.records import (
    Record,
    Records,
    is_text,
    not_json,
    open_records,
    parse_objects,
    read_json_rows,
    read_lines,
)

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
    """Name given by the user; empty means: look for a usual name."""
    usual: tuple[str, ...]


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


def read_named(inputs: tuple[str, ...], config: LabelledConfig, role: str) -> NamedTexts:
    """Reads all inputs of one role, ``train``, ``dev`` or ``test``, in order.

    There is at least one text; texts are UTF-8 and not blank.

    Raises:
        DataError: An input cannot be read, or a text or a label in it cannot be used; the message
            names the place.
    """
    found = NamedTexts()
    columns = (
        Column("text", config.text_column, TEXT_COLUMNS),
        Column("label", config.label_column, LABEL_COLUMNS),
    )
    most = config.limit if role == "train" and config.limit else None
    for given in inputs:
        first_empty, empty = "", 0
        for place, (text, value) in _values(open_records(given, role), columns):
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


def read_texts(source: Path | TextIO, text_column: str = "") -> Iterator[str]:
    """Yields texts as they are asked for.

    The source is a file of records, a ``.txt`` file (one text a line), or an open stream: JSONL if
    its first line that is not blank begins a JSON object, else one text a line.

    Raises:
        DataError: Something cannot be read, or a text is empty; the message names the line.
    """
    if not isinstance(source, Path):
        records = _open_stream(source)
    elif source.suffix.lower() == ".txt":
        records = _plain(read_lines(source), str(source))
    else:
        records = open_records(str(source), "test")
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


def _texts(records: Records, column: Column) -> Iterator[str]:
    for place, (text,) in _values(records, (column,)):
        _check_text(text, place)
        if not text or text.isspace():
            raise DataError(f"{place}: the text is empty, so nothing can be predicted; remove it")
        yield text


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
        return _by_name(place, tuple(record), columns)
    if not isinstance(record, list):
        raise DataError(
            f"{place}: a JSON {type(record).__name__}, neither list nor object; write "
            f'[["text", "label"], ...] or [{{"text": ..., "label": ...}}, ...]'
        )
    if records.header is not None:
        names = _by_name(f"{records.name}:1", records.header, columns)
        return [records.header.index(name) for name in names]
    if given := [column.given for column in columns if column.given]:
        raise DataError(f"{place}: a list has no column {given[0]!r}; write objects")
    # a text to predict may still have its label behind it, as a pair to train on has
    if not len(columns) <= len(record) <= 2:
        raise DataError(
            f"{place}: {len(record)} values where {len(columns)} are needed; write objects, whose "
            f"fields have names"
        )
    return [*range(len(columns))]


def _by_name(where: str, names: tuple[str, ...], columns: tuple[Column, ...]) -> list[str]:
    keys: list[str] = []
    for what, given, usual in columns:
        found = [n for n in names if n == given or (not given and n.strip().casefold() in usual)]
        if len(found) == 1 and found[0] not in keys:
            keys.append(found[0])
            continue
        listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        if len(found) > 1:
            why = f"several columns could hold the {what} (columns here: {listed})"
        elif given:
            why = f"no column {given!r} (columns here: {listed})"
        else:
            why = f"no column that usually holds the {what} (columns here: {listed or 'none'})"
        raise DataError(f"{where}: {why}; give its name by --{what}-column")
    return keys


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

    A ``.json`` file holds a list, or a table from name to id; any other file one name a line, where
    blanks around a name, and blank lines, do not count.
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
    """Reads ``{"name": id, ...}``."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_json(error, path, 1) from None
    names = {number: label_name(name, str(path)) for name, number in found.items()}
    if not names or sorted(map(repr, names)) != sorted(map(repr, range(len(found)))):
        raise DataError(
            f"{path}: the ids must run from 0 without a hole, one for each name; write "
            f'{{"name": 0, "other name": 1, ...}}'
        )
    return tuple(names[number] for number in range(len(found)))


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


def read_labelled(config: LabelledConfig, seed: int) -> LabelledData:
    """Reads, checks and, without dev files, splits labelled texts.

    Texts and class numbers keep the order of the files. The seed, 0 <= seed < 2**64, decides the
    split and nothing else.

    Raises:
        ConfigError: There is no input, an optional library is missing, or a name is malformed.
        DataError: Something cannot be read or used; the message names the place and the remedy.
    """
    if not config.train:
        raise ConfigError("data.train is empty; name a file with texts and labels by --train")
    named = read_named(config.train, config, "train")
    listed = config.labels or (read_names(config.labels_file) if config.labels_file else ())
    where = config.labels_file or "data.labels"
    names = listed or sorted_names(set(named.labels))
    why = f"{where} lacks it; add it there, or correct the text's label"
    train, note = _known(named, names, "train", why)
    notes = [note, *_advice(named, config, listed)]
    present = set(train.labels)
    if absent := [name for number, name in enumerate(names) if number not in present]:
        raise DataError(
            f"{where}: no training text has the label {shown(absent)}, so that class would never "
            f"be learned; add texts or remove the name"
        )
    if len(names) < 2:
        raise DataError(
            f"data.train: every text has the label {names[0]!r}; a classifier needs at least two "
            f"classes: add texts of another, or check the column (--label-column)"
        )
    if config.dev:
        why = "no training text has it; add some, or correct the label"
        dev, note = read_known(config.dev, config, names, "dev", why)
        notes.append(note)
    else:
        keep, out = stratified_split(train.labels, config.dev_fraction, seed)
        notes.extend(
            f"class {names[label]!r} has a single text: it is trained on and not evaluated"
            for label, count in sorted(Counter(train.labels).items())
            if count == 1
        )
        train, dev = _take(train, keep), _take(train, out)
    notes.extend(_odd(names, train, dev, split=not config.dev))
    sha256 = _content_sha256(names, train, dev)
    return LabelledData(names, train, dev, sha256, tuple(note for note in notes if note))


def read_known(
    inputs: tuple[str, ...],
    config: LabelledConfig,
    names: tuple[str, ...],
    role: str,
    why: str = "the classifier has no such class",
) -> tuple[LabelledTexts, str]:
    """Reads labelled texts, ``inputs`` like ``config.train``, of classes that are known already.

    ``why`` is how the message about an unknown label goes on after the label.

    Returns:
        Texts and class numbers, and a note where texts were left out.
    """
    return _known(read_named(inputs, config, role), names, role, why)


def _known(
    named: NamedTexts, names: tuple[str, ...], role: str, why: str
) -> tuple[LabelledTexts, str]:
    numbers = numbers_of(named, names, why)
    note = f"{role}: {named.dropped} empty texts left out" if named.dropped else ""
    return LabelledTexts(named.texts, [numbers[label] for label in named.labels]), note


def _advice(named: NamedTexts, config: LabelledConfig, listed: Sequence[str]) -> list[str]:
    """Notes on options that data of this kind usually want."""
    notes = []
    if not listed and all(map(is_integer, named.first)):
        notes.append("the classes are numbers: --labels or --labels-file gives their names")
    if not config.join_words and 2 * named.segmented > len(named.texts):
        notes.append(
            f"{named.segmented} of {len(named.texts)} train texts have blanks between Chinese "
            f"words: --join-words removes them"
        )
    return notes


def _content_sha256(names: Sequence[str], train: LabelledTexts, dev: LabelledTexts) -> str:
    """Hashes names, texts and labels in order, each prefixed by its length to be unambiguous."""
    digest = hashlib.sha256()
    for strings, labels in ((names, []), (train.texts, train.labels), (dev.texts, dev.labels)):
        digest.update(len(strings).to_bytes(8, "little"))
        for string in strings:
            raw = string.encode("utf-8")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        digest.update(np.array(labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _take(part: LabelledTexts, places: npt.NDArray[np.int64]) -> LabelledTexts:
    chosen = places.tolist()
    return LabelledTexts([part.texts[i] for i in chosen], [part.labels[i] for i in chosen])


def _odd(
    names: tuple[str, ...], train: LabelledTexts, dev: LabelledTexts, *, split: bool
) -> list[str]:
    """Notes on labels that are allowed but may surprise."""
    notes = []
    seen = set(train.texts)
    repeated = sum(text in seen for text in dev.texts)
    if repeated:
        notes.append(
            f"{repeated} of {len(dev)} dev texts also stand in train, so scores on them are too "
            f"good"
        )
    if not split and (absent := sorted(set(range(len(names))) - set(dev.labels))):
        notes.append(f"dev has no text of {shown(names[label] for label in absent)}")
    return notes


def stratified_split(
    labels: Sequence[int], fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Holds out a share of the examples of every class, at least one; the seed decides which.

    A class with a single example keeps it in train. (scikit-learn's ``train_test_split`` refuses
    such a class, seeds from 2**32 on, and fewer examples held out than there are classes.)

    Returns:
        (train, dev): places in ``labels``, ascending; together every place once.
    """
    found = np.asarray(labels, dtype=np.int64)
    order = permutation("held out", seed, 0, len(found))
    is_dev = np.zeros(len(found), dtype=np.bool_)
    for label in np.unique(found):
        members = order[found[order] == label]
        if len(members) > 1:
            is_dev[members[: held_out(len(members), fraction)]] = True
    if not is_dev.any():
        raise DataError(
            "data.train: no class has two texts, so none can be held out for evaluation; add "
            "texts or give data.dev"
        )
    return np.flatnonzero(~is_dev), np.flatnonzero(is_dev)
