"""``datasets:NAME[/CONFIG][@SPLIT]``: a dataset of the Hugging Face Hub, or one in a local folder.

No code of a dataset is ever run: ``datasets`` has had no loading scripts since version 4, and older
versions are refused. Parquet, Arrow, CSV and JSON hold data only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.labelled.config import HUB_PREFIX
from halfstep.trainer.data.records import Record, Records

MIN_VERSION = 4
"""First major version of ``datasets`` without loading scripts."""

USUAL_SPLITS = {
    "train": ("train",),
    "dev": ("validation", "dev", "valid", "val"),
    "test": ("test",),
}
"""Split of each role when none is given."""

LOCAL_MARKS = (".", "/", "~")
READ_ROWS = 1000


def read_dataset(given: str, role: str) -> Records:
    """Opens a dataset as records with named columns; class numbers become class names.

    Args:
        given: ``datasets:`` and then ``owner/name``, ``owner/name/config``, ``name``, a folder
            (saved by ``save_to_disk``, or holding data files) or a .parquet file; then perhaps
            ``@split``, of datasets that are not saved by ``save_to_disk`` also
            ``@split[:1000]``.
        role: ``train``, ``dev`` or ``test``.

    Returns:
        Objects of all columns; the numbers are those of the rows, counted from 1.

    Raises:
        ConfigError: ``datasets`` is not installed or too old, or the name is malformed.
        DataError: There is no such dataset, config or split, or it cannot be had offline.
    """
    library = _library()
    name, split = _parse(given)
    local = _local(name)
    try:
        loaded = _load(library, name, local, split)
        chosen = _split(loaded, given, split, role)
        rows = _rows(library, chosen, given)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # whatever a foreign library makes of networks and files
        raise _cannot_load(library, given, local is not None, error) from None
    return Records(given, rows, unit="row")


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{HUB_PREFIX} needs the datasets library; pip install 'halfstep[hf]', or give a "
            f".jsonl, .json, .csv or .tsv file"
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
    name = given.removeprefix(HUB_PREFIX)
    split = ""
    if not Path(name).expanduser().exists() and "@" in name:
        name, _, split = name.rpartition("@")
        if not split.strip():
            raise ConfigError(f"{given}: no split after @; write @train, or leave the @ out")
    parts = name.split("/")
    if not name.strip() or (
        not name.startswith(LOCAL_MARKS)
        and not Path(name).exists()
        and (len(parts) > 3 or not all(part.strip() for part in parts))
    ):
        raise ConfigError(
            f"{given}: give {HUB_PREFIX}OWNER/NAME[/CONFIG][@SPLIT], or {HUB_PREFIX}./FOLDER"
        )
    return name, split


def _local(name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith(LOCAL_MARKS):
        raise DataError(f"{name}: no such file or folder; check the path")
    return None


def _load(library: Any, name: str, local: Path | None, split: str) -> Any:
    """Loads all splits of a saved or undivided dataset, else only what is asked for."""
    wanted = {"split": split} if split else {}
    if local is None:
        parts = name.split("/")
        config = {"name": parts[2]} if len(parts) == 3 else {}
        return library.load_dataset("/".join(parts[:2]), **config, **wanted)
    if local.is_file():
        if local.suffix.lower() != ".parquet":
            raise DataError(
                f"{local}: {HUB_PREFIX} reads folders and .parquet files; give other files without "
                f"{HUB_PREFIX}"
            )
        return library.load_dataset("parquet", data_files={"train": str(local)}, **wanted)
    if (local / "dataset_dict.json").exists() or (local / "state.json").exists():
        for state in (local / "state.json", *local.glob("*/state.json")):
            _check_contained(state)
        saved = library.load_from_disk(str(local))
        if not split:
            return saved
        if not isinstance(saved, dict):
            raise DataError(f"{local}: a dataset without splits; leave @{split} out")
        if split not in saved:
            raise _no_split(str(local), split, saved)
        return saved[split]
    return library.load_dataset(str(local), **wanted)


def _check_contained(state: Path) -> None:
    """Refuses a saved dataset whose list of files leads out of its folder."""
    if not state.exists():
        return
    files = json.loads(state.read_text(encoding="utf-8")).get("_data_files") or []
    for file in files:
        name = str(file["filename"])
        if name in ("", ".", "..") or Path(name).name != name:
            raise DataError(f"{state}: the data file {name!r} lies outside the folder; refused")


def _split(loaded: Any, given: str, split: str, role: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    for usual in USUAL_SPLITS[role]:
        if usual in loaded:
            return loaded[usual]
    raise _no_split(given, split, loaded)


def _no_split(given: str, split: str, loaded: Any) -> DataError:
    what = f"no split {split!r}" if split else "no split of a usual name"
    return DataError(f"{given}: {what}; write one of @{', @'.join(sorted(loaded))} after the name")


def _rows(library: Any, chosen: Any, given: str) -> Iterator[tuple[int, Record]]:
    if not isinstance(chosen, library.Dataset):
        raise DataError(f"{given}: a {type(chosen).__name__}, not a table of rows; choose a split")
    # Images, audio and the like would be decoded only to be ignored.
    plain = [
        name for name, feature in chosen.features.items() if not hasattr(feature, "decode_example")
    ]
    names = {
        name: list(chosen.features[name].names)
        for name in plain
        if isinstance(chosen.features[name], library.ClassLabel)
    }
    return _named_rows(chosen.with_format(None).select_columns(plain), names, given)


def _named_rows(
    chosen: Any, names: dict[str, list[str]], given: str
) -> Iterator[tuple[int, Record]]:
    number, batches = 0, chosen.iter(batch_size=READ_ROWS)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # a damaged Arrow file
            raise DataError(f"{given}: row {number + 1}: cannot be read: {error}") from None
        if batch is None:
            return
        columns = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            row = dict(zip(columns, values, strict=True))
            for column, known in names.items():
                value = row[column]
                if value is not None and value < 0:  # how datasets marks rows without a label
                    row[column] = None
                elif value is not None:
                    if value >= len(known):
                        raise DataError(
                            f"{given}: row {number}: class {value} in {column!r}, which names "
                            f"{len(known)} classes; mend the dataset"
                        )
                    row[column] = known[value]
            yield number, row


def _cannot_load(library: Any, given: str, local: bool, error: Exception) -> DataError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = f"{given}: cannot be loaded: {lines[0][:300]}"
    if local:
        return DataError(f"{why}; check the folder (save_to_disk, or .parquet files) and the split")
    save = (
        f"on a machine with a network, run datasets.load_dataset(...).save_to_disk('FOLDER'), copy "
        f"the folder here and give {HUB_PREFIX}./FOLDER"
    )
    offline = bool(getattr(library.config, "HF_HUB_OFFLINE", False)) or any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    )
    if offline:
        return DataError(
            f"{why}; HF_HUB_OFFLINE is set and the dataset is not in the cache: {save}"
        )
    return DataError(
        f"{why}; check OWNER/NAME/CONFIG and the split (a config needs the owner too). If this "
        f"machine has no network: {save}"
    )
