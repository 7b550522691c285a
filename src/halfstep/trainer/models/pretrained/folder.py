"""Hugging Face model folders, opened without trusting them.

Nothing of a folder runs, no pickle is opened and nothing that a file names is fetched: JSON is read
and checked here (``foreign_config.py``), weights come from safetensors files that
lie inside the folder, and ``transformers`` is handed the checked settings and the tensors, never
the folder, so that none of its other ways to find weights (pickles, sharded training checkpoints,
adapters, file names out of ``config.json``) is open. Python of the folder runs only where its user
says that it is trusted.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained.foreign_config import (
    dictionaries,
    refuse_code,
    refuse_quantized,
    reset_implementations,
    without_code,
)
from halfstep.trainer.models.pretrained.hf_files import INDEX, WEIGHTS
from halfstep.trainer.models.pretrained.hub import require, resolve_source
from halfstep.trainer.models.pretrained.skeleton import refuse_more_layers, require_plain_files

ADAPTER = "adapter_config.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class PretrainedFolder:
    """A folder whose ``config.json`` and weights are there, readable and inside."""

    name: str
    """The hub name, or the folder's full path."""
    folder: Path
    config: Any
    """The ``transformers`` config object."""
    auto_map: dict[str, Any]
    """Classes of the folder's own code by Auto class; empty unless that code is trusted."""
    files: tuple[Path, ...]
    """The safetensors files."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, copies in memory of their own.

        Raises:
            CheckpointError: A file is damaged, or two tensors have one name.
        """
        found: dict[str, Tensor] = {}
        for file in self.files:
            for name, tensor in read_safetensors(file).items():
                if name in found:
                    raise CheckpointError(f"{file}: tensor {name!r} is in another file too")
                found[name] = tensor.clone()
        return found

    def has_class(self, mapping: str) -> bool:
        """Whether ``transformers``' table of this name has the architecture."""
        auto = require("transformers").models.auto.modeling_auto
        return type(self.config) in getattr(auto, mapping)

    def model_class(self, auto_class: str, mapping: str, what: str) -> Any:
        """The class that builds the model.

        Args:
            auto_class: Name of the Auto class, under which trusted code is looked up.
            mapping: Name of the table in ``transformers`` from config class to model class.
            what: For the error: what the model cannot do.

        Raises:
            ConfigError: The architecture has none.
        """
        transformers = require("transformers")
        if auto_class in self.auto_map:
            dynamic = transformers.dynamic_module_utils
            return dynamic.get_class_from_dynamic_module(
                self.auto_map[auto_class], self.folder, local_files_only=True
            )
        if not self.has_class(mapping):
            raise ConfigError(
                f"{self.folder / 'config.json'}: model_type {self.config.model_type!r} has no "
                f"{what} in transformers ({auto_class})"
            )
        found = getattr(transformers.models.auto.modeling_auto, mapping)[type(self.config)]
        return found[0] if isinstance(found, tuple) else found


def open_folder(
    source: str | os.PathLike[str], *, trust_remote_code: bool = False, revision: str = ""
) -> PretrainedFolder:
    """The checked folder of a model.

    Args:
        source: A folder or a hub name (:func:`resolve_source`).
        trust_remote_code: Let the folder's own Python run; refused otherwise.
        revision: Of a hub name.

    Raises:
        ConfigError: The source is none, brings code of its own that is not trusted, or is
            quantized.
        CheckpointError: A file is missing, damaged, a pickle, or outside the folder.
    """
    folder = resolve_source(source, revision=revision, trust_remote_code=trust_remote_code)
    nested = folder / "0_Transformer"  # older folders of sentence-transformers
    if not (folder / "config.json").exists() and (nested / "config.json").exists():
        folder = nested
    if (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} holds an adapter, not a model: open it with its base (open_adapted_lm), or "
            "merge it first"
        )
    require_plain_files(folder)
    found = read_json(folder / "config.json", f"a model folder has config.json and {WEIGHTS}")
    if not isinstance(found.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'}: model_type is missing or no string")
    refuse_code(folder / "config.json", found, trust_remote_code)
    refuse_quantized(folder / "config.json", found)
    files = tuple(_weight_files(folder))
    tensors = sum(map(_count, files))
    for level in dictionaries(found):
        refuse_more_layers(folder / "config.json", level, tensors)
    auto_map = (found.get("auto_map") or {}) if trust_remote_code else {}
    config = _config(folder, found, trusted=bool(auto_map))
    own_name = str(folder.resolve()) if Path(source).expanduser().is_dir() else os.fspath(source)
    return PretrainedFolder(own_name, folder, config, auto_map, files)


def _config(folder: Path, found: dict[str, Any], *, trusted: bool) -> Any:
    """The config object of a folder: of what was checked, or of the folder's own trusted code."""
    transformers = require("transformers")
    with quiet(), tempfile.TemporaryDirectory(prefix="halfstep-") as checked:
        file = Path(checked) / "config.json"
        file.write_text(json.dumps(without_code(found)), encoding="utf-8")
        try:
            config = transformers.AutoConfig.from_pretrained(
                folder if trusted else checked, local_files_only=True, trust_remote_code=trusted
            )
        except Exception as error:  # transformers raises many kinds for a bad config
            raise CheckpointError(
                f"{folder / 'config.json'} is not one that transformers {transformers.__version__} "
                f"knows: {first_line(error)}"
            ) from error
    config.name_or_path = str(folder)
    reset_implementations(config)
    return config


def read_json(file: Path, hint: str) -> dict[str, Any]:
    """The object of a JSON file inside a model's folder.

    Raises:
        CheckpointError: It is missing (the hint follows), unreadable, outside, or no object.
    """
    if not file.exists():
        raise CheckpointError(f"{file} does not exist: {hint}")
    _require_inside(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, as views of it.

    Raises:
        CheckpointError: It is damaged or no safetensors file.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or not a safetensors file ({error}); download or copy it again"
        ) from error


def stored_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype that holds all stored floating numbers exactly; fp32 where nothing is floating.

    Raises:
        CheckpointError: A dtype that is not one to train in (8 bits, say).
    """
    widest: torch.dtype | None = None
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"tensor {name!r} is stored as {tensor.dtype}; allowed are "
                    f"{', '.join(map(str, _DTYPES))}"
                )
            same = widest is None or widest == tensor.dtype
            widest = tensor.dtype if same else torch.promote_types(widest, tensor.dtype)  # type: ignore[arg-type]
    return widest or torch.float32


def require_finite(model: nn.Module, folder: Path) -> None:
    """Raises CheckpointError that names the first parameter that holds NaN or inf."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"{folder}: tensor {name!r} holds NaN or inf")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps ``transformers``' load reports, bars and warnings off the terminal; then as before."""
    logging = require("transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """The first lines of an error on one line, at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _weight_files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the shards that the index names; all inside and not damaged."""
    placed: dict[str, Path] = {}
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).exists():
        placed = _placed_by_index(folder)
        files = sorted(set(placed.values()))
    else:
        pickles = sorted(folder.glob("pytorch_model*.bin"))
        if pickles:
            raise CheckpointError(
                f"{pickles[0]} is a pickle, which can run code when it is opened, and there is no "
                f"{WEIGHTS}. If you trust its source, convert it with transformers: "
                "AutoModel.from_pretrained(folder).save_pretrained(new_folder), or take a revision "
                "of the model that has safetensors"
            )
        raise CheckpointError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing, though {INDEX} names it")
        _require_inside(file)
        names = read_safetensors(file).keys()
        lost = [name for name, there in placed.items() if there == file and name not in names]
        if lost:
            raise CheckpointError(
                f"{file}: tensor {lost[0]!r} is missing, though {INDEX} places it here"
            )
    return files


def _count(file: Path) -> int:
    """How many tensors a file holds."""
    with safe_open(file, framework="pt", device="cpu") as content:
        return len(content.keys())


def _placed_by_index(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, as the index has it."""
    index = folder / INDEX
    weight_map = read_json(index, "").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} names no tensor: weight_map is missing or empty")
    for name in weight_map.values():
        # A name out of a file must not lead out of the folder: no separator, no leading dot.
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not a plain .safetensors file name")
    return {tensor: folder / name for tensor, name in weight_map.items()}


def _require_inside(file: Path) -> None:
    """Raises CheckpointError for a link out of the folder; the hub cache links to its blobs."""
    folder, real = file.parent.resolve(), file.resolve()
    roots = [folder]
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        roots.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{file} is a link that leads out of its folder, to {real}; copy the file instead"
        )
