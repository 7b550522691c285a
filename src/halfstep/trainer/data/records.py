"""Finds the files that are named, and reads records from tables, JSON files and datasets.

Text is read strictly as UTF-8, a byte order mark at the start is dropped, and only a line feed ends
a line. The CSV and JSON readers of ``datasets`` are not used: they shift fields, turn strings into
dates, and name no line in errors (``docs/decisions/0015-reading-records.md``).
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.token_file import HASH, Progress, cache_root, no_progress

Kind: TypeAlias = Literal["text", "jsonl"]

KINDS: dict[str, Kind] = {".jsonl": "jsonl"}
"""Kinds by suffix; the others are text."""
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
    """Lists the files that paths, globs and folders stand for, in the order given.

    ``~`` is the home folder, and ``field`` what messages call the paths, such as ``data.train``.
    The sources are not empty.

    Raises:
        DataError: Something is missing, unreadable or empty.
    """
    return tuple(source for path in paths for source in _expand(path, field))


def inspect_file(path: Path) -> Source:
    """Looks at one file without reading it, or raises DataError if it is no regular file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(f"{path}: dangling symbolic link; check the path") from None
        raise DataError(f"{path}: no such file or folder; check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; give a file, a folder or a glob")
    kind = KINDS.get(path.suffix.lower(), "text")
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


def _expand(given: str, field: str) -> list[Source]:
    path = Path(given).expanduser()
    if os.path.isdir(path):
        return _folder(path, field)
    # A name that exists is that file, even when it looks like a pattern ("draft[1].txt").
    if not os.path.lexists(path) and glob.has_magic(given):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        sources = [inspect_file(match) for match in matches if not os.path.isdir(match)]
        if not sources:
            raise DataError(f"{path}: this pattern of {field} matches no file; check it")
        return _not_all_empty(path, sources)
    source = inspect_file(path)
    if source.size == 0:
        raise DataError(f"{path}: the file is empty; remove it from {field} or fill it")
    return [source]


def _folder(folder: Path, field: str) -> list[Source]:
    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(parent, name) for name in files if not name.startswith(".")]
        found.extend(path for path in paths if path.suffix.lower() in FOLDER_SUFFIXES)
    if not found:
        raise DataError(
            f"{folder}: this folder of {field} holds no {', '.join(FOLDER_SUFFIXES)} file at any "
            f"depth (names with a leading dot are skipped); name files with other endings directly"
        )
    ordered = sorted(found, key=lambda path: path.relative_to(folder).as_posix())
    return _not_all_empty(folder, [inspect_file(path) for path in ordered])


def _not_all_empty(given: Path, sources: list[Source]) -> list[Source]:
    kept = [source for source in sources if source.size > 0]
    if not kept:
        raise DataError(f"{given}: all {len(sources)} files found here are empty; fill one")
    return kept


Record: TypeAlias = list[Any] | dict[str, Any]
Rows: TypeAlias = Iterator[tuple[str, Any]]
"""Pairs (place for messages, record); a place is ``file:line`` or ``dataset: row N``."""
Lines: TypeAlias = Iterable[tuple[int, str]]
"""Pairs (line number from 1, line with its line end)."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_RECORD_BYTES = 64 << 20
"""Longest line allowed, to limit memory, as JSON cannot be parsed in pieces."""
MAX_LIST_BYTES = 1 << 30
"""Largest ``.json`` file allowed, to limit memory, as it is parsed from one string."""
TABLE_SUFFIXES = (".csv", ".tsv")
HUB_PREFIX = "datasets:"
MIN_VERSION = 4
"""First major version of ``datasets`` without loading scripts."""
USUAL_SPLITS = {
    "train": ("train",),
    "dev": ("validation", "dev", "valid", "val"),
    "test": ("test",),
}
"""Names of the split for each role, in order of preference, when the user gives none."""
LOCAL_MARKS = (".", "/", "~")


class Records(NamedTuple):
    """The records of one input, read as they are asked for."""

    name: str
    """The input, for messages."""
    rows: Rows
    header: tuple[str, ...] | None = None
    """Names of the columns of a table; None where there are none or objects name their own."""


def open_records(given: str, role: str) -> Records:
    """Opens a ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.parquet`` file, or a named dataset.

    A name is ``datasets:NAME[/CONFIG][@SPLIT]``; ``role`` (``train``, ``dev`` or ``test``) selects
    its default split. The first line of a table names the columns.

    Raises:
        ConfigError: If ``datasets`` is needed and missing, or a name is malformed.
        DataError: If the input is missing, empty, or of another kind; later, during iteration, if
            a record cannot be read. The message names the place.
    """
    path = Path(given).expanduser()
    suffix = path.suffix.lower()
    if given.startswith(HUB_PREFIX):
        return Records(given, read_dataset(given, role))
    if suffix not in READERS:
        found = suffix or "names without suffix"
        hint = "; a folder is datasets:FOLDER" if path.is_dir() else ""
        suffixes = ", ".join(READERS)
        raise DataError(
            f"{given}: records are read from {suffixes} files and datasets:NAME, not from "
            f"{found}{hint}; convert or rename it"
        )
    rows = READERS[suffix](path)
    if suffix not in TABLE_SUFFIXES:
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
    """Yields (place, object) for each line that is not blank; refuses other JSON values."""
    for number, line in lines:
        if line and not line.isspace():
            place = f"{name}:{number}"
            try:
                value = json.loads(line.rstrip("\r\n"))
            except (ValueError, RecursionError) as error:
                raise not_json(error, name, number) from None
            if not isinstance(value, dict):
                kind = f"a JSON {type(value).__name__}, not an object"
                raise DataError(f'{place}: {kind}; write {{"text": ...}} on every line')
            yield place, value


def read_json_rows(path: Path) -> Rows:
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
            raise not_json(error, path, 1) from None
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
    # Without strict, a quote that is never closed would swallow the rest of the file.
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


def not_json(error: Exception, name: Path | str, number: int) -> DataError:
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


# ``datasets:NAME[/CONFIG][@SPLIT]``: a dataset of the Hugging Face Hub, or one in a local folder.
# No code of a dataset is ever run: ``datasets`` has had no loading scripts since version 4, and
# older versions are refused. Parquet, Arrow, CSV and JSON hold data only.


def read_dataset(given: str, role: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, columns) of a dataset's rows; class numbers become class names.

    Args:
        given: A ``.parquet`` file, or ``datasets:`` and then ``owner/name``, ``owner/name/config``,
            ``name`` or a folder (saved by ``save_to_disk``, or holding data files); then perhaps
            ``@split``, of datasets that are not saved by ``save_to_disk`` also ``@split[:1000]``.
        role: ``train``, ``dev`` or ``test``.

    Raises:
        ConfigError: ``datasets`` is not installed or too old, or the name is malformed.
        DataError: There is no such dataset, config or split, or it cannot be had offline.
    """
    library = _library(given)
    name, split = _parse(given)
    path = Path(name).expanduser()
    if not path.exists() and name.startswith(LOCAL_MARKS):
        raise DataError(f"{name}: no such file or folder; check the path")
    try:
        found = _load(library, name, split)
        if isinstance(found, dict):
            chosen = next((found[usual] for usual in USUAL_SPLITS[role] if usual in found), None)
            if chosen is None:
                raise _no_split(given, split, found)
            found = chosen
        if not isinstance(found, library.Dataset):
            raise DataError(f"{given}: a {type(found).__name__}, not a table; choose a split")
    except (ConfigError, DataError):
        raise
    except Exception as error:  # datasets raises many kinds for network and file errors
        raise _cannot_load(library, given, path.exists(), error) from None
    return _rows(library, found, given)


def _library(given: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{given} needs the datasets library; pip install 'halfstep[hf]', or give a .jsonl, "
            f".json, .csv or .tsv file"
        ) from None
    version = str(datasets.__version__)
    if int(version.split(".")[0]) < MIN_VERSION:
        raise ConfigError(
            f"datasets {version} can run code of a dataset's own; pip install "
            f"'datasets>={MIN_VERSION}'"
        )
    return datasets


def _parse(given: str) -> tuple[str, str]:
    """Takes ``datasets:NAME@SPLIT`` apart; an existing path may hold an @."""
    name, split = given.removeprefix(HUB_PREFIX), ""
    if not Path(name).expanduser().exists() and "@" in name:
        name, _, split = name.rpartition("@")
        if not split.strip():
            raise ConfigError(f"{given}: no split after @; write @train, or leave the @ out")
    parts = name.split("/")
    local = name.startswith(LOCAL_MARKS) or Path(name).exists() or name.endswith(".parquet")
    if not name.strip() or not (local or (len(parts) <= 3 and all(map(str.strip, parts)))):
        raise ConfigError(
            f"{given}: give {HUB_PREFIX}OWNER/NAME[/CONFIG][@SPLIT], or {HUB_PREFIX}./FOLDER"
        )
    return name, split


def _load(library: Any, name: str, split: str) -> Any:
    """Loads all splits of a saved or undivided dataset, else only what is asked for."""
    local = Path(name).expanduser()
    wanted = {"split": split} if split else {}
    if not local.exists() and not name.endswith(".parquet"):
        # The library's own cache: what was downloaded before is found there without a network.
        owner, _, rest = name.partition("/")
        title, _, config = rest.partition("/")
        named = {"name": config} if config else {}
        return library.load_dataset(f"{owner}/{title}" if title else owner, **named, **wanted)
    cache = {"cache_dir": str(cache_root("") / "datasets")}
    if not local.is_dir():
        if local.suffix.lower() != ".parquet":
            raise DataError(f"{local}: give a file that is not .parquet without {HUB_PREFIX}")
        return library.load_dataset(
            "parquet", data_files={"train": str(local)}, split=split or "train", **cache
        )
    if not ((local / "dataset_dict.json").exists() or (local / "state.json").exists()):
        return library.load_dataset(str(local), **wanted, **cache)
    for state in (local / "state.json", *local.glob("*/state.json")):
        _check_contained(state)
    saved = library.load_from_disk(str(local))
    if split and not isinstance(saved, dict):
        raise DataError(f"{local}: a dataset without splits; leave @{split} out")
    if split and split not in saved:
        raise _no_split(str(local), split, saved)
    return saved[split] if split else saved


def _check_contained(state: Path) -> None:
    """Refuses a saved dataset whose list of files leads out of its folder."""
    files = json.loads(state.read_text("utf-8")).get("_data_files") if state.exists() else ()
    for file in files or ():
        name = str(file["filename"])
        if name in ("", ".", "..") or Path(name).name != name:
            raise DataError(f"{state}: the data file {name!r} lies outside the folder; refused")


def _no_split(given: str, split: str, found: Any) -> DataError:
    what = f"no split {split!r}" if split else "no split of a usual name"
    return DataError(f"{given}: {what}; write one of @{', @'.join(sorted(found))} after the name")


def _rows(library: Any, table: Any, given: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # Images, audio and the like would be decoded only to be ignored.
    plain = {k: f for k, f in table.features.items() if not hasattr(f, "decode_example")}
    names = {k: f.names for k, f in plain.items() if isinstance(f, library.ClassLabel)}
    # Iterating row by row would take a hundred times as long.
    batches = table.with_format(None).select_columns(list(plain)).iter(batch_size=1000)
    rows = (
        dict(zip(b, row, strict=True)) for b in batches for row in zip(*b.values(), strict=True)
    )
    for number in count(1):
        place = f"{given}: row {number}"
        try:
            row = next(rows, None)
        except Exception as error:  # a damaged Arrow file
            raise DataError(f"{place}: cannot be read: {error}") from None
        if row is None:
            return
        for column, known in names.items():
            value = row[column]
            if value is not None and value >= len(known):
                raise DataError(
                    f"{place}: class {value} in {column!r}, which names {len(known)} classes; mend "
                    f"the dataset"
                )
            # datasets marks rows without a label by None or -1
            row[column] = None if value is None or value < 0 else known[value]
        yield place, row


def _cannot_load(library: Any, given: str, local: bool, error: Exception) -> DataError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = f"{given}: cannot be loaded: {lines[0][:300]}"
    if local:
        return DataError(f"{why}; check the folder (save_to_disk, or .parquet files) and the split")
    save = (
        f"on a machine with a network, run datasets.load_dataset(...).save_to_disk('FOLDER'), copy "
        f"the folder here and give {HUB_PREFIX}./FOLDER"
    )
    if library.config.HF_HUB_OFFLINE:
        return DataError(
            f"{why}; HF_HUB_OFFLINE is set and the dataset is not in the cache: {save}"
        )
    return DataError(f"{why}; check OWNER/NAME/CONFIG and the split. Without a network: {save}")


READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": lambda path: _table(path, ","),
    ".tsv": lambda path: _table(path, "\t"),
    ".jsonl": lambda path: parse_objects(read_lines(path), path),
    ".ndjson": lambda path: parse_objects(read_lines(path), path),
    ".json": lambda path: read_json_rows(path),
    ".parquet": lambda path: read_dataset(str(inspect_file(path).path), "train"),
}
"""Suffix of a file to its reader; to support another format, add a line here."""
