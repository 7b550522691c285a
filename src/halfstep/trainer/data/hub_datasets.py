"""``datasets:NAME[/CONFIG][@SPLIT]``: a dataset of the Hugging Face Hub, or one in a local folder.

No code of a dataset is ever run: ``datasets`` has had no loading scripts since version 4, and older
versions are refused. Parquet, Arrow, CSV and JSON hold data only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.cache import cache_root

HUB_PREFIX = "datasets:"
MIN_VERSION = 4
"""First major version of ``datasets`` without loading scripts."""
USUAL_SPLITS = {
    "train": ("train",),
    "dev": ("validation", "dev", "valid", "val"),
    "test": ("test",),
}
"""Split of each role when none is given."""
LOCAL_MARKS = (".", "/", "~")


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
    except Exception as error:  # whatever a foreign library makes of networks and files
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
    # Row by row it would take a hundred times as long.
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
