"""Reads labelled texts for a classifier, each with its place for errors, and splits them."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from halfstep.errors import DataError
from halfstep.trainer.data.batches import Indices, LabelledTexts, held_out, permutation
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.records import Rows, decode, open_records, parse_objects, read_lines

_TEXT = """text texta sentence content contents review reviews reviewtext reviewbody body comment
    comments commenttext tweet tweettext post message sms question utterance phrase query document
    abstract summary description shortdescription title headline
    文本 内容 评论 评论内容 评价 评价内容 正文 句子 留言 微博 微博内容 弹幕 问题 摘要 标题"""
_LABEL = """label labels class classes classindex classlabel category categories target emotion
    sentiment polarity rating ratings overall star stars starrating score intent topic y
    标签 类别 分类 情感 情绪 情感倾向 评分 星级 意图 主题"""
USUAL = {"text": frozenset(_TEXT.split()), "label": frozenset(_LABEL.split())}
"""Names of columns where the user gives none, without case, blanks, "-" and "_"."""
SURE = {"text", "文本", "label", "labels", "标签"}
"""Those that are taken though a column with another usual name is there."""
STREAM = "standard input"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Everything a classifier is trained and evaluated on."""

    names: tuple[str, ...]  # of the classes; a label is a place in here
    train: LabelledTexts
    dev: LabelledTexts
    sha256: str  # over names, texts and labels, whatever files they came from
    notes: tuple[str, ...]  # what a user should know though nothing is wrong


def read_labelled(config: LabelledConfig, seed: int) -> LabelledData:
    """Reads, checks and, without dev files, splits labelled texts.

    Texts and class numbers keep the order of the files. The seed decides the split alone.
    """
    notes = list[str]()
    found = _read(config.train, config, "train", notes)
    names = config.labels or _sorted({label for _, _, label in found})
    train = _numbered(found, names)
    if len(set(train.labels)) < 2:
        raise DataError(
            f"data.train: every text has the label {found[0][2]!r}; a classifier needs at least "
            f"two classes: add texts of another, or check the column (--label-column)"
        )
    if config.dev:
        dev = read_known(config.dev, config, names, "dev", notes)
    else:
        keep, out = stratified_split(train.labels, config.dev_fraction, seed)
        train, dev = _take(train, keep), _take(train, out)
    seen = set(train.texts)
    if repeated := sum(text in seen for text in dev.texts):
        notes.append(
            f"{repeated} of {len(dev)} dev texts also stand in train, which inflates the scores"
        )
    return LabelledData(names, train, dev, _content_sha256(names, train, dev), tuple(notes))


def read_known(
    inputs: tuple[str, ...],
    config: LabelledConfig,
    names: tuple[str, ...],
    role: str,
    notes: list[str],
) -> LabelledTexts:
    """Reads labelled texts, ``inputs`` like ``config.train``, of known classes; adds to notes."""
    return _numbered(_read(inputs, config, role, notes), names)


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
    return (_text(text, place) for place, (text,) in _values(rows, {"text": text_column}, []))


def _plain(lines: Iterator[tuple[int, str]], name: str) -> Rows:
    for number, line in lines:
        yield f"{name}:{number}", {"text": line.removesuffix("\n").removesuffix("\r")}


def _read(
    inputs: tuple[str, ...], config: LabelledConfig, role: str, notes: list[str]
) -> list[tuple[str, str, str]]:
    """Reads (place, text, name of the label) of all inputs; notes what a user should know."""
    columns = {"text": config.text_column, "label": config.label_column}
    found = list[tuple[str, str, str]]()
    for given in inputs:
        for place, (text, value) in _values(open_records(given, role), columns, notes):
            found.append((place, _text(text, place), _label(value, place)))
    if not found:
        raise DataError(f"{role}: no texts in {', '.join(inputs) or 'no file'}; see --train")
    return found


def _is_empty(value: object) -> bool:
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _text(value: object, place: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise _unusable(value, f"{place}: the text must be a string")


def _label(value: object, place: str) -> str:
    """Turns the label at a place into a name: 3, 3.0 and "3.0" into "3", true into "true"."""
    if isinstance(value, str) and value.strip():
        return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", value)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(value).lower() if isinstance(value, bool) else str(int(value))
    raise _unusable(value, f"{place}: the label must be a string or an integer")


def _unusable(value: object, what: str) -> DataError:
    got = "an empty one" if _is_empty(value) else type(value).__name__
    return DataError(f"{what}, got {got}; correct or remove it")


def _values(
    rows: Rows, columns: dict[str, str], notes: list[str]
) -> Iterator[tuple[str, list[Any]]]:
    """Yields (place, values of the wanted columns)."""
    keys: list[str] = []
    for place, record in rows:
        if not isinstance(record, dict):
            raise DataError(f'{place}: write [{{"text": ..., "label": ...}}, ...]')
        keys = keys or [_key(place, record, *column, notes) for column in columns.items()]
        if lost := [key for key in keys if key not in record]:
            raise DataError(
                f"{place}: no field {lost[0]!r}, which the first record has (fields here: "
                f"{_shown(list(record))}); add it"
            )
        yield place, [record[key] for key in keys]


def _key(place: str, record: dict[str, Any], what: str, given: str, notes: list[str]) -> str:
    """Finds the column that was named, else the one with a usual name."""
    option, listed = f"--{what}-column", f"columns here: {_shown(list(record))}"
    if given and given in record:  # not the nameless column that pandas writes
        return given
    if given:
        raise DataError(f"{place}: no column {given!r} ({listed}); correct {option}")
    plain = {name: re.sub(r"[\s_-]", "", name).casefold() for name in record}
    usual = [name for name in record if plain[name] in USUAL[what]]
    sure = [name for name in usual if plain[name] in SURE]
    if not usual:
        raise DataError(
            f"{place}: no column could hold the {what} ({listed}); give its name by {option} (the "
            f"first line of a table must name the columns)"
        )
    if len(usual) > 1 and len(sure) != 1:
        raise DataError(
            f"{place}: several columns could hold the {what} ({_shown(usual)}); write {option} "
            f"{shlex.quote(usual[0])} or another"
        )
    if len(usual) > 1 and what == "text":
        notes.append(f"of {_shown(usual)} only {sure[0]!r} is read; {option} names another")
    return (sure or usual)[0]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:20])) or "none"


def _sorted(names: set[str]) -> tuple[str, ...]:
    """Sorts by value if all names are integers, else by code point."""
    numbers = all(map(_INTEGER.fullmatch, names))
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def _numbered(found: list[tuple[str, str, str]], names: tuple[str, ...]) -> LabelledTexts:
    """Maps labels, which are names or, where no name is an integer, numbers of the classes."""
    numbers = {_label(name, "labels"): number for number, name in enumerate(names)}
    if not any(map(_INTEGER.fullmatch, numbers)):
        numbers |= {str(number): number for number in range(len(names))}
    for place, _, label in found:
        if label not in numbers:
            raise DataError(
                f"{place}: unknown label {label!r} (allowed: {_shown(names)}); correct it, or add "
                f"it to --labels or to the texts for training"
            )
    return LabelledTexts([text for _, text, _ in found], [numbers[label] for _, _, label in found])


def _content_sha256(names: Sequence[str], *parts: LabelledTexts) -> str:
    """Hashes names, texts and labels in order, each prefixed by its length to be unambiguous."""
    digest = hashlib.sha256()
    for strings, labels in ((names, []), *((part.texts, part.labels) for part in parts)):
        digest.update(len(strings).to_bytes(8, "little"))
        for raw in (string.encode() for string in strings):
            digest.update(len(raw).to_bytes(8, "little") + raw)
        digest.update(np.array(labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _take(part: LabelledTexts, places: Indices) -> LabelledTexts:
    chosen = places.tolist()
    return LabelledTexts([part.texts[i] for i in chosen], [part.labels[i] for i in chosen])


def stratified_split(labels: Sequence[int], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Holds out a share of the examples of every class, at least one; the seed decides which.

    A class with a single example keeps it in train, where scikit-learn's ``train_test_split``
    refuses. Returns the places of both parts in ``labels``, ascending.
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
