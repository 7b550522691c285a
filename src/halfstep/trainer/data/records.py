"""Finds the files that are named, and reads records from tables, JSON files and datasets.

Text is read strictly as UTF-8, a byte order mark at the start is dropped, and only a line feed ends
a line. The CSV and JSON readers of ``datasets`` are not used: they shift fields, turn strings into
dates, and name no line in errors (``docs/decisions/0015-reading-records.md``).
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.token_file import HASH, Progress, cache_root, no_progress

Kind: TypeAlias = Literal["text", "jsonl"]

FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".py")
CHUNK_BYTES = 1 << 20
"""Size of one read from disk: large enough to hide the call's cost, small in memory."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input file as it was when it was listed."""

    path: Path
    kind: Kind
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of the last change, to notice a file that changes while it is read."""


def find_sources(paths: tuple[str, ...], field: str) -> tuple[Source, ...]:
    """Lists the files that paths and folders stand for, in the order given.

    ``~`` is the home folder, and ``field`` what messages call the paths, such as ``data.train``.
    The sources are not empty.

    Raises:
        DataError: Something is missing, unreadable or empty.
    """
    found: list[Source] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            found += _folder(path, field)
            continue
        source = inspect_file(path)
        if source.size == 0:
            raise DataError(f"{path}: the file is empty; remove it from {field} or fill it")
        found.append(source)
    return tuple(found)


def inspect_file(path: Path) -> Source:
    """Looks at one file without reading it, or raises DataError if it is no regular file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file or folder; check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; give a file or a folder")
    kind: Kind = "jsonl" if path.suffix.lower() == ".jsonl" else "text"
    return Source(path, kind, status.st_size, status.st_mtime_ns)


def read_chunks(source: Source, start: int, stop: int) -> Iterator[bytes]:
    """Yields the bytes ``start`` to ``stop`` of a file in chunks of at most ``CHUNK_BYTES``.

    Raises:
        DataError: The file cannot be read, or ends before ``stop``.
    """
    try:
        with open(source.path, "rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(CHUNK_BYTES, stop - start))
                if not chunk:
                    raise changed(source)
                start += len(chunk)
                yield chunk
    except OSError as error:
        raise unreadable(source.path, error) from None


def content_sha256(sources: Iterable[Source], progress: Progress = no_progress) -> str:
    """Hashes kind, size and content of the files in order, but not their paths."""
    sources = tuple(sources)
    total, done = sum(source.size for source in sources), 0
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.kind}:{source.size}:".encode())
        for chunk in read_chunks(source, 0, source.size):
            digest.update(chunk)
            done += len(chunk)
            progress(HASH, done, total)
    return digest.hexdigest()


def check_unchanged(sources: Iterable[Source]) -> None:
    """Refuses files that changed, by size or time, since they were listed.

    The content hash names the cached result, so text that changes between the hash and the encoding
    would be kept under a wrong name for ever.
    """
    for source in sources:
        if inspect_file(source.path) != source:
            raise changed(source)


def unreadable(path: Path, error: OSError) -> DataError:
    """Makes the error for a file that cannot be read, for the caller to raise."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}; check path and rights")


def changed(source: Source) -> DataError:
    """Makes the error for a file that changed while it was read, for the caller to raise."""
    return DataError(
        f"{source.path}: changed while it was read (was {source.size} bytes); "
        f"run again when nothing writes to it"
    )


def _folder(folder: Path, field: str) -> list[Source]:
    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(parent, name) for name in files if not name.startswith(".")]
        found.extend(path for path in paths if path.suffix.lower() in FOLDER_SUFFIXES)
    ordered = sorted(found, key=lambda path: path.relative_to(folder).as_posix())
    kept = [source for source in map(inspect_file, ordered) if source.size > 0]
    if not kept:
        raise DataError(
            f"{folder}: this folder of {field} holds no {', '.join(FOLDER_SUFFIXES)} file with "
            f"text at any depth (names with a leading dot are skipped); name files with other "
            f"endings directly"
        )
    return kept


Rows: TypeAlias = Iterator[tuple[str, Any]]
"""Pairs (place for messages, record); a place is ``file:line`` or ``dataset: row N``."""
Lines: TypeAlias = Iterable[tuple[int, str]]
"""Pairs (line number from 1, line with its line end)."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HUB_PREFIX = "datasets:"
MIN_VERSION = 4
"""First major version of ``datasets`` without loading scripts."""
USUAL_SPLITS = {
    "train": ("train",),
    "dev": ("validation", "dev", "valid", "val"),
    "test": ("test",),
}
"""Names of the split for each role, in order of preference, when the user gives none."""


def open_records(given: str, role: str) -> Rows:
    """Opens a ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.parquet`` file, or a named dataset.

    A name is ``datasets:NAME[@SPLIT]``; ``role`` (``train``, ``dev`` or ``test``) selects its
    default split. The first line of a table names the columns. Records are objects by column; of
    JSON files they may be any value.

    Raises:
        ConfigError: If ``datasets`` is needed and missing.
        DataError: If the input is missing, empty, or of another kind; later, during iteration, if
            a record cannot be read. The message names the place.
    """
    path = Path(given).expanduser()
    suffix = path.suffix.lower()
    if given.startswith(HUB_PREFIX):
        return read_dataset(given.removeprefix(HUB_PREFIX), role)
    if suffix not in READERS:
        found = suffix or "names without suffix"
        hint = "; a folder is datasets:FOLDER" if path.is_dir() else ""
        raise DataError(
            f"{path}: records are read from {', '.join(READERS)} files and datasets:NAME, not from "
            f"{found}{hint}; convert or rename it"
        )
    return READERS[suffix](path)


def read_lines(path: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number from 1 within the whole file, line with its end) of a file.

    ``start`` and ``stop`` are bytes at which a line begins or ends; None is the end of the file.

    Raises:
        DataError: The file is missing, empty or unreadable, or a line is not UTF-8.
    """
    source = inspect_file(path)
    if source.size == 0:
        raise DataError(f"{path}: the file is empty; fill it or leave it out")
    number = sum(chunk.count(b"\n") for chunk in read_chunks(source, 0, start))
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while line := file.readline():
                number += 1
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
    """Yields (place, object) for each line that is not blank; refuses other JSON values."""
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


def is_text(string: str) -> bool:
    """Tells whether a string can be written as UTF-8: it holds no half of a surrogate pair."""
    try:
        string.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_list(path: Path) -> Rows:
    text = "".join(line for _, line in read_lines(path))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("{") or getattr(error, "msg", "") != "Extra data":
            raise _not_json(error, path, 1) from None
        yield from parse_objects(read_lines(path), path)
        return
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list):
        raise DataError(f"{path}: must hold a JSON list of objects, or one object a line")
    for number, item in enumerate(found, 1):
        yield f"{path}: item {number}", item


def _table(path: Path, separator: str) -> Rows:
    """Yields rows with the place where they begin; blank lines are left out.

    Quoted fields may hold separators, quotes ("") and line ends.
    """
    lines = (line for _, line in read_lines(path))
    # Without strict, a quote that is never closed would swallow the rest of the file.
    reader = csv.reader(lines, delimiter=separator, strict=True)
    names: list[str] = []
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
            break
        if row and not names:
            names = row
        elif row and len(row) != len(names):
            raise DataError(
                f"{place}: {len(row)} fields where the first line has {len(names)}; put quotes "
                f"around a field that holds the separator or a line end"
            )
        elif row:
            yield place, dict(zip(names, row, strict=True))
    if not names:
        raise DataError(f"{path}: only blank lines; the first line must name the columns")


def _not_json(error: Exception, name: Path | str, number: int) -> DataError:
    """Makes the error for text from a line on that is not JSON, for the caller to raise."""
    why = f"not usable JSON: {error}"  # such as a number of 5,000 digits, or [[[[[...
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
            f"line; convert the file to UTF-8, such as by: iconv -f GBK -t UTF-8 OLD > NEW"
        ) from None


def read_dataset(given: str, role: str) -> Rows:
    """Yields (place, columns) of a dataset's rows; class numbers become class names.

    No code of a dataset is ever run: ``datasets`` has had no loading scripts since version 4, and
    older versions are refused. ``given`` is a ``.parquet`` file, a folder (saved by
    ``save_to_disk``, or holding data files) or a name on the hub; then perhaps ``@split``. ``role``
    is as for :func:`open_records`.

    Raises:
        ConfigError: ``datasets`` is not installed or too old.
        DataError: There is no such dataset or split, or it cannot be had offline.
    """
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise ConfigError(
            f"{given} needs the datasets library; pip install 'halfstep[hf]', or give a .jsonl, "
            f".json, .csv or .tsv file"
        ) from None
    if int(datasets.__version__.split(".")[0]) < MIN_VERSION:
        raise ConfigError(
            f"datasets {datasets.__version__} can run code of a dataset's own; pip install "
            f"'datasets>={MIN_VERSION}'"
        )
    name, _, split = (given, "", "") if os.path.exists(given) else given.partition("@")
    try:
        found = _load(datasets, Path(name).expanduser(), name)
    except Exception as error:  # datasets raises many kinds for network and file errors
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{given}: cannot be loaded: {why[:300]}; check the name. Without a network, run "
            f"datasets.load_dataset(...).save_to_disk('FOLDER') elsewhere, copy the folder here "
            f"and give {HUB_PREFIX}FOLDER"
        ) from None
    if isinstance(found, dict):
        usual = (split,) if split else USUAL_SPLITS[role] if len(found) > 1 else tuple(found)
        table = next((found[each] for each in usual if each in found), None)
        if table is None:
            raise DataError(f"{given}: write one of @{', @'.join(sorted(found))} after it")
        found = table
    yield from _rows(found, given)


def _load(datasets: Any, path: Path, name: str) -> Any:
    """Loads a table, or tables by split."""
    cache = str(cache_root("") / "datasets")
    if path.is_file():
        return datasets.load_dataset("parquet", data_files=str(path), cache_dir=cache)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    if path.is_dir():
        return datasets.load_dataset(str(path), cache_dir=cache)
    # In the library's own cache, a dataset that was downloaded before is found without a network.
    return datasets.load_dataset(name)


def _rows(table: Any, given: str) -> Rows:
    # Images, audio and the like would be decoded only to be ignored.
    plain = {k: f for k, f in table.features.items() if not hasattr(f, "decode_example")}
    names = {k: f.names for k, f in plain.items() if type(f).__name__ == "ClassLabel"}
    # Iterating row by row would take a hundred times as long.
    batches = table.with_format(None).select_columns(list(plain)).iter(batch_size=1000)
    numbers = count(1)
    for batch in batches:
        for row in zip(*batch.values(), strict=True):
            record = dict(zip(batch, row, strict=True))
            for column, known in names.items():
                number = record[column]
                # datasets marks rows without a label by None or -1
                record[column] = None if number is None or number < 0 else known[number]
            yield f"{given}: row {next(numbers)}", record


READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": lambda path: _table(path, ","),
    ".tsv": lambda path: _table(path, "\t"),
    ".jsonl": lambda path: parse_objects(read_lines(path), path),
    ".json": _json_list,
    ".parquet": lambda path: read_dataset(str(inspect_file(path).path), "train"),
}
"""Suffix of a file to its reader; to support another format, add a line here."""
