"""Reads labelled texts for a classifier, each with its place for errors, and splits them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.batches import Indices, held_out, permutation
from halfstep.trainer.data.config import LabelledConfig, LabelledData, LabelledTexts
from halfstep.trainer.data.records import Rows, decode, open_records, parse_objects, read_lines

USUAL = {
    "text": ("text", "sentence", "content", "review", "tweet", "post", "文本", "内容"),
    "label": ("label", "labels", "category", "emotion", "class", "target", "标签", "类别"),
}
"""Names of the columns, where the user gives none."""
STREAM = "standard input"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def read_labelled(config: LabelledConfig, seed: int) -> LabelledData:
    """Reads, checks and, without dev files, splits labelled texts.

    Texts and class numbers keep the order of the files. The seed decides the split alone.
    """
    if not config.train:
        raise ConfigError("data.train is empty; name a file with texts and labels by --train")
    found = _read(config.train, config, "train")
    names = config.labels or _sorted({label for _, _, label in found})
    train = _numbered(found, names)
    if len(set(train.labels)) < 2:
        raise DataError(
            f"data.train: every text has the label {found[0][2]!r}; a classifier needs at least "
            f"two classes: add texts of another, or check the column (--label-column)"
        )
    if config.dev:
        dev = read_known(config.dev, config, names, "dev")
    else:
        keep, out = stratified_split(train.labels, config.dev_fraction, seed)
        train, dev = _take(train, keep), _take(train, out)
    notes, seen = list[str](), set(train.texts)
    if repeated := sum(text in seen for text in dev.texts):
        notes.append(
            f"{repeated} of {len(dev)} dev texts also stand in train, so scores on them are too "
            f"good"
        )
    return LabelledData(names, train, dev, _content_sha256(names, train, dev), tuple(notes))


def read_known(
    inputs: tuple[str, ...], config: LabelledConfig, names: tuple[str, ...], role: str
) -> LabelledTexts:
    """Reads labelled texts, ``inputs`` like ``config.train``, of classes that are known already."""
    return _numbered(_read(inputs, config, role), names)


def read_texts(source: Path | BinaryIO, text_column: str = "") -> Iterator[str]:
    """Yields texts as they are asked for.

    The source is a file of records, a ``.txt`` file (one text a line), or an open stream of bytes:
    JSONL if it begins with "{", else one text a line.
    """
    if not isinstance(source, Path):
        lines = ((n, decode(line, f"{STREAM}:{n}")) for n, line in enumerate(source, 1))
        first = next(lines, (1, ""))
        kind = parse_objects if first[1].startswith("{") else _plain
        rows = kind(chain([first] if first[1] else [], lines), STREAM)
    elif source.suffix.lower() == ".txt":
        rows = _plain(read_lines(source), str(source))
    else:
        rows = open_records(str(source), "test")
    return (_text(text, place) for place, (text,) in _values(rows, {"text": text_column}))


def _plain(lines: Iterator[tuple[int, str]], name: str) -> Rows:
    for number, line in lines:
        yield f"{name}:{number}", {"text": line.removesuffix("\n").removesuffix("\r")}


def _read(inputs: tuple[str, ...], config: LabelledConfig, role: str) -> list[tuple[str, str, str]]:
    """Reads (place, text, name of the label) of all inputs."""
    columns = {"text": config.text_column, "label": config.label_column}
    found = [
        (place, _text(text, place), _label(value, place))
        for given in inputs
        for place, (text, value) in _values(open_records(given, role), columns)
    ]
    if not found:
        raise DataError(f"{role}: no texts in {', '.join(inputs)}; add some")
    return found


def _text(text: object, place: str) -> str:
    if isinstance(text, str) and text.strip():
        return text
    kind = "an empty one" if isinstance(text, str) else type(text).__name__
    raise DataError(f"{place}: the text must be a string, got {kind}; correct or remove it")


def _label(value: object, place: str) -> str:
    """Turns the label at a place into a name: strings as they are, 3 into "3", true into "true"."""
    if isinstance(value, int):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str) and value.strip():
        return value
    kind = "an empty one" if isinstance(value, str) else type(value).__name__
    raise DataError(f"{place}: the label must be a string or an integer, got {kind}; correct it")


def _values(rows: Rows, columns: dict[str, str]) -> Iterator[tuple[str, list[Any]]]:
    """Yields (place, values of the wanted columns); a JSON list is a text and its label."""
    keys: list[str] = []
    for place, record in rows:
        if isinstance(record, list) and 1 <= len(record) <= 2:
            record = dict(zip(("text", "label"), record, strict=False))
        if not isinstance(record, dict):
            raise DataError(
                f'{place}: write [["text", "label"], ...] or [{{"text": ..., "label": ...}}, ...]'
            )
        keys = keys or [_key(place, record, *column) for column in columns.items()]
        if lost := [key for key in keys if key not in record]:
            raise DataError(
                f"{place}: no field {lost[0]!r}, which the first record has (fields here: "
                f"{_shown(list(record))}); add it"
            )
        yield place, [record[key] for key in keys]


def _key(place: str, record: dict[str, Any], what: str, given: str) -> str:
    """Finds the column that was named, else the one with a usual name."""
    usual = [name for name in record if name.strip().casefold() in USUAL[what]]
    found = [name for name in record if name == given] if given else usual
    if len(found) != 1:
        why = f"{'several columns' if found else 'no column'} could hold the {what}"
        why = f"no column {given!r}" if given else why
        listed = _shown(list(record))
        raise DataError(
            f"{place}: {why} (columns here: {listed}); give its name by --{what}-column"
        )
    return found[0]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:20])) or "none"


def _sorted(names: set[str]) -> tuple[str, ...]:
    """Sorts by value if all names are integers, else by code point."""
    if all(map(_INTEGER.fullmatch, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _numbered(found: list[tuple[str, str, str]], names: tuple[str, ...]) -> LabelledTexts:
    """Maps labels, which are names or, where no name is an integer, numbers of the classes."""
    numbers = {name: number for number, name in enumerate(names)}
    if not any(map(_INTEGER.fullmatch, names)):
        numbers |= {str(number): number for number in range(len(names))}
    for place, _, label in found:
        if label not in numbers:
            raise DataError(
                f"{place}: unknown label {label!r} (allowed: {_shown(names)}); correct it, or add "
                f"it to --labels or to the texts for training"
            )
    return LabelledTexts([text for _, text, _ in found], [numbers[label] for _, _, label in found])


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


def _take(part: LabelledTexts, places: Indices) -> LabelledTexts:
    chosen = places.tolist()
    return LabelledTexts([part.texts[i] for i in chosen], [part.labels[i] for i in chosen])


def stratified_split(labels: Sequence[int], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Holds out a share of the examples of every class, at least one; the seed decides which.

    A class with a single example keeps it in train. (scikit-learn's ``train_test_split`` refuses
    such a class, seeds from 2**32 on, and fewer examples held out than there are classes.) Returns
    the places of both parts in ``labels``, ascending.
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
