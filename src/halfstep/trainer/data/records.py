"""Finds the files that are named, and reads records from tables, JSON files and datasets.

Text is read strictly as UTF-8, a byte order mark at the start is dropped, and only a line feed ends
a line. The CSV and JSON readers of ``datasets`` are not used: they shift fields, turn strings into
dates, and name no line in errors (``docs/decisions/0015-reading-records.md``).
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias

from halfstep.errors import DataError

FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".py")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a part of it."""

    path: Path
    start: int
    stop: int  # the bytes from start to stop are meant

    @property
    def size(self) -> int:
        """Bytes in this part."""
        return self.stop - self.start


def find_sources(paths: tuple[str, ...]) -> tuple[Source, ...]:
    """Lists the files that paths and folders stand for, in the order given."""
    found: list[Source] = []
    for given in paths:
        path = Path(given if given.strip() else "an empty path").expanduser()
        sources = _folder(path) if path.is_dir() else [inspect_file(path)]
        sources = [source for source in sources if source.size > 0]
        if not sources:
            raise DataError(
                f"{path}: there is no text in it (of a folder, files that end in "
                f"{', '.join(FOLDER_SUFFIXES)} are read, at any depth); name other files"
            )
        found += sources
    return tuple(found)


def _folder(folder: Path) -> list[Source]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shown = (name for name in names if not any(part.startswith(".") for part in name.parts))
    kept = [name for name in shown if name.suffix.lower() in FOLDER_SUFFIXES]
    return [inspect_file(folder / name) for name in sorted(kept, key=Path.as_posix)]


def inspect_file(path: Path) -> Source:
    """Looks at one file without reading it."""
    try:
        return Source(path, 0, path.stat().st_size)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file or folder; check the path") from None


def content_sha256(sources: tuple[Source, ...]) -> str:
    """Hashes size and content of the parts in order, but not their paths."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"text:{source.size}:".encode())
        with open(source.path, "rb") as file:
            file.seek(source.start)
            while chunk := file.read(min(1 << 20, source.stop - file.tell())):
                digest.update(chunk)
    return digest.hexdigest()


def decode(raw: bytes, place: str, offset: int = 0) -> str:
    """Decodes UTF-8 that begins ``offset`` bytes after a place."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise DataError(
            f"{place}: not UTF-8: byte 0x{raw[at]:02x} at byte offset {offset + at}; convert it: "
            "iconv -f GBK -t UTF-8 OLD > NEW, if it is GBK"
        ) from None


Rows: TypeAlias = Iterator[tuple[str, Any]]
"""Pairs (place for messages, record); a place is ``file:line`` or ``dataset: row N``."""
Lines: TypeAlias = Iterable[tuple[int, str]]
"""Pairs (line number from 1, line with its line end)."""
HUB_PREFIX = "datasets:"
MAX_FIELD = 1 << 26
"""Characters of one field of a table; Python's own limit is 128 KiB."""


def open_records(given: str, role: str) -> Rows:
    """Opens a ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.parquet`` file, or a named dataset.

    A name is ``datasets:NAME[@SPLIT]``; ``role`` (``train``, ``dev`` or ``test``) is its split
    otherwise, where ``dev`` is ``validation``. The first line of a table names the columns. Records
    are objects by column; of JSON files they may be any value.
    """
    if given.startswith(HUB_PREFIX):
        return read_dataset(given.removeprefix(HUB_PREFIX), role)
    path = Path(given).expanduser()
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise DataError(
            f"{path}: records are read from {', '.join(READERS)} files and datasets:NAME, not from "
            f"{suffix or 'names without suffix'}; convert or rename it"
        )
    return READERS[suffix](inspect_file(path).path)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line with its end)."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield number, decode(content, f"{path}:{number}")


def parse_objects(lines: Lines, name: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) for each line that is not blank; refuses other JSON values."""
    for number, line in lines:
        if line and not line.isspace():
            value = _parse(line.rstrip("\r\n"), name, number)
            if not isinstance(value, dict):
                kind = f"a JSON {type(value).__name__}, not an object"
                raise DataError(f'{name}:{number}: {kind}; write {{"text": ...}} on every line')
            yield f"{name}:{number}", value


def _parse(text: str, name: Path | str, number: int) -> Any:
    """Parses the JSON that begins at a line of a file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"not usable JSON: {error}; correct it"  # such as a number of 5,000 digits
        if isinstance(error, json.JSONDecodeError):
            number += error.lineno - 1
            why = f"not JSON: {error.msg} at column {error.colno}; write one object a line"
            why += " in a .jsonl file, or a .json list of objects"
        raise DataError(f"{name}:{number}: {why}") from None
    return value


def _json(path: Path) -> Rows:
    """Reads a list, or what many call .json too: one object a line."""
    lines = [*read_lines(path)]
    text = "".join(line for _, line in lines)
    if text.lstrip().startswith("{"):
        yield from parse_objects(lines, path)
        return
    found = _parse(text, path, 1)
    if not isinstance(found, list):
        raise DataError(f"{path}: must hold a JSON list of objects, or one object a line")
    for number, item in enumerate(found, 1):
        yield f"{path}: item {number}", item


def _table(path: Path, separator: str) -> Rows:
    """Yields rows with the place where they begin; blank ones are left out.

    Quoted fields may hold separators, quotes ("") and line ends. Where the header lacks the usual
    separator, the one that it has is taken.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD))
    lines = (line for _, line in read_lines(path))
    head = next(lines, "")
    if separator not in head:
        separator = next((one for one in ",;\t|" if one in head), separator)
    # Without strict, a quote that is never closed would swallow the rest of the file.
    reader = csv.reader(chain([head], lines), delimiter=separator, strict=True)
    begin, names = 1, list[str]()
    try:
        for row in reader:
            place, begin = f"{path}:{begin}", reader.line_num + 1
            if row and not names:
                names = row
                if twice := [name for name in names if name and names.count(name) > 1]:
                    raise DataError(f"{place}: two columns are called {twice[0]!r}; rename one")
            elif any(row) and len(row) != len(names):
                raise DataError(
                    f"{place}: {len(row)} fields where the first line has {len(names)}; put quotes "
                    f"around a field that holds the separator or a line end"
                )
            elif any(row):
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}:{begin}: the fields of the row that begins here cannot be told apart: "
            f'{error}; close every quote, write quotes within a quoted field twice (""), or use '
            f".jsonl"
        ) from None


def read_dataset(given: str, role: str) -> Rows:
    """Yields (place, columns) of a dataset's rows; class numbers become class names.

    No code of a dataset is ever run: ``datasets`` has had no loading scripts since version 4.
    ``given`` is a ``.parquet`` file, a folder (saved by ``save_to_disk``, or holding data files) or
    a name on the hub; then perhaps ``@split``.
    """
    import datasets  # optional, and slow to import

    name, _, split = (given, "", "") if os.path.exists(given) else given.partition("@")
    split = split or {"dev": "validation"}.get(role, role)
    path = Path(name).expanduser()
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            table = datasets.load_from_disk(str(path))
            table = table[split] if isinstance(table, dict) else table
        elif path.is_file():
            table = datasets.load_dataset("parquet", data_files=str(path), split="train")
        else:
            table = datasets.load_dataset(str(path) if path.is_dir() else name, split=split)
    except Exception as error:  # datasets raises many kinds for network and file errors
        raise DataError(
            f"{given}: cannot be loaded: {error!r:.300}; check the name, and the split: "
            f"{HUB_PREFIX}NAME@SPLIT. Without a network give {HUB_PREFIX}FOLDER with what "
            "save_to_disk wrote elsewhere"
        ) from None
    names = {k: f.names for k, f in table.features.items() if isinstance(f, datasets.ClassLabel)}
    numbers = count(1)
    # Iterating row by row would take a hundred times as long.
    for batch in table.with_format(None).iter(batch_size=1000):
        for column, known in names.items():
            # datasets marks rows without a label by None or -1
            batch[column] = [known[n] if n is not None and n >= 0 else None for n in batch[column]]
        for row in zip(*batch.values(), strict=True):
            yield f"{given}: row {next(numbers)}", dict(zip(batch, row, strict=True))


READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": lambda path: _table(path, ","),
    ".tsv": lambda path: _table(path, "\t"),
    ".jsonl": lambda path: parse_objects(read_lines(path), path),
    ".json": _json,
    ".parquet": lambda path: read_dataset(str(path), "train"),
}
"""Suffix of a file to its reader; to support another format, add a line here."""
