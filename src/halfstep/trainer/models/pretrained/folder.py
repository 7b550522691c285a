"""Hugging Face model folders, opened without trusting them.

Nothing of a folder runs, no pickle is opened and nothing that a file names is fetched. JSON is read
and checked here, as some keys of ``config.json`` name code: an attention implementation is looked
up on the hub and run. Weights come from safetensors files only. ``transformers`` is handed the
checked settings and the tensors, never the folder, so that none of its other ways to find weights
(pickles, sharded training checkpoints, adapters, file names out of ``config.json``) is open. Python
of the folder runs only where its user says that it is trusted.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained.hub import quiet, require_library, resolve_source

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
OLD_ENCODER = "halfstep-encoder"
"""``model_type`` of the classifiers that version 0.1 made from scratch, which is gone."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CODE = ("auto_map", "custom_pipelines", "custom_pipeline", "custom_generate")
"""Keys that name Python files."""
_QUANTIZED = ("quantization_config", "compression_config")
_KERNELS = ("use_kernels", "kernel_config", "allow_all_kernels", "fusion_config")
"""Keys that replace layers of the model; nothing that is trained here needs them."""
_ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:", "local_dir:")
"""How ``timm``, which ``transformers`` calls for some models, is told to look elsewhere."""
_LAYERS = re.compile(r"(^|_)(n_layers?|layers|num_layers?|depth|num_hidden_groups)$")


@dataclass(frozen=True)
class PretrainedFolder:
    """A folder whose ``config.json`` and weights are there and readable."""

    name: str
    """The hub name, or the folder's full path."""
    folder: Path
    config: Any
    """The ``transformers`` config object."""
    auto_map: dict[str, Any]
    """Classes of the folder's own code by Auto class; empty unless that code is trusted."""
    tensors: dict[str, Tensor]
    """All weights by name, in memory."""

    def has_class(self, auto_class: str) -> bool:
        """Whether an Auto class of ``transformers`` knows the architecture."""
        return (
            type(self.config) in getattr(require_library("transformers"), auto_class)._model_mapping
        )

    def model_class(self, auto_class: str, what: str) -> Any:
        """The class that builds the model, or a ConfigError that says ``what`` it is not."""
        transformers = require_library("transformers")
        if auto_class in self.auto_map:
            dynamic = transformers.dynamic_module_utils
            return dynamic.get_class_from_dynamic_module(
                self.auto_map[auto_class], self.folder, local_files_only=True
            )
        if not self.has_class(auto_class):
            raise ConfigError(
                f"{self.folder / 'config.json'}: model_type {self.config.model_type!r} has no "
                f"{what} in transformers ({auto_class})"
            )
        found = getattr(transformers, auto_class)._model_mapping[type(self.config)]
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
        CheckpointError: A file is missing, damaged or a pickle.
    """
    folder = resolve_source(source, revision=revision, trust_remote_code=trust_remote_code)
    file = folder / "config.json"
    if (folder / ADAPTER).exists() and not file.exists():
        raise ConfigError(
            f"{folder} holds an adapter, not a model: open it with its base (open_adapted_lm), or "
            "merge it first"
        )
    found = read_json_object(file, f"a model folder has config.json and {WEIGHTS}")
    if not isinstance(found.get("model_type"), str):
        raise CheckpointError(f"{file}: model_type is missing or no string")
    if found["model_type"] == OLD_ENCODER:
        raise ConfigError(
            f"{folder} holds a classifier that an earlier halfstep made from scratch, which this "
            "one cannot read; train it anew (--model scratch:small), or use it with that version"
        )
    refuse_code(file, found, trust_remote_code)
    tensors = read_tensors(folder)
    for level in _dictionaries(found):
        _refuse_level(file, level, len(tensors))
    auto_map = (found.get("auto_map") or {}) if trust_remote_code else {}
    config = _config(folder, found, trusted=bool(auto_map))
    own_name = str(folder.resolve()) if Path(source).expanduser().is_dir() else os.fspath(source)
    return PretrainedFolder(own_name, folder, config, auto_map, tensors)


def refuse_code(file: Path, found: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuses a JSON file that asks for code, on whatever level.

    Where code is trusted, that is the folder's own: code from elsewhere is refused all the same.

    Raises:
        ConfigError: The file asks for Python that is not trusted, for a kernel of the hub, or for
            another file in its place.
    """
    if found.get("configuration_files"):
        raise ConfigError(
            f"{file}: configuration_files would have another file read in its place; remove the key"
        )
    for level in _dictionaries(found):
        asked = [key for key in _CODE if level.get(key)]
        if asked and not trust_remote_code:
            raise ConfigError(
                f"{file}: {asked[0]} asks to run Python code that comes with the model. Nothing of "
                "it was run. If you have read and trust it, pass trust_remote_code "
                f"(--trust-remote-code); or remove {asked[0]} to use transformers' own class of "
                "this model_type"
            )
        for key, value in level.items():
            # transformers' spelling of a kernel: owner/name, perhaps @revision and :function.
            if "implementation" in key and re.search(r"[/:@|\\]", "".join(_texts(value))):
                raise ConfigError(
                    f"{file}: {key}={value!r:.80} asks to fetch and run code from the hub. Nothing "
                    "of it was fetched; remove the key"
                )
            if isinstance(value, str) and value.lower().startswith(_ELSEWHERE):
                raise ConfigError(
                    f"{file}: {key}={value!r:.80} names a model in another place; a folder must "
                    "hold its model itself"
                )


def read_json_object(file: Path, hint: str = "") -> dict[str, Any]:
    """The object of a JSON file, or a CheckpointError; where it is missing, the hint follows."""
    if not file.exists():
        raise CheckpointError(f"{file} does not exist: {hint}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name, from ``model.safetensors`` or else the index's shards.

    They are copies in memory: a file that is replaced later does not change them.

    Raises:
        CheckpointError: A file is missing, damaged or a pickle.
    """
    placed: dict[str, str] = {}
    if not (folder / WEIGHTS).exists():
        placed = _placed_by_index(folder)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(placed.values())) or [WEIGHTS]:
        tensors |= read_safetensors(folder / name)
    lost = sorted(set(placed) - set(tensors))
    if lost:
        raise CheckpointError(
            f"{folder / placed[lost[0]]}: tensor {lost[0]!r} is missing, though {INDEX} places it "
            "here"
        )
    return tensors


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, or a CheckpointError."""
    try:
        # load_file gives views of the mapped file
        return {name: view.clone() for name, view in load_file(file).items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; download or copy it again") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or not a safetensors file ({error}); download or copy it again"
        ) from error


def stored_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype that holds all stored floating numbers exactly; fp32 where nothing is floating.

    Raises CheckpointError for one that is not to train in (8 bits, say).
    """
    widest: torch.dtype | None = None
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"tensor {name!r} is stored as {tensor.dtype}; allowed are "
                    f"{', '.join(map(str, _DTYPES))}"
                )
            widest = torch.promote_types(widest or tensor.dtype, tensor.dtype)
    return widest or torch.float32


def first_line(error: Exception) -> str:
    """The first lines of an error on one line, at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _config(folder: Path, found: dict[str, Any], *, trusted: bool) -> Any:
    """The config object of a folder: of what was checked, or of the folder's own trusted code."""
    transformers = require_library("transformers")
    base = transformers.PreTrainedConfig
    # Taken out is what chooses how the model is computed, which is ours to choose, and what would
    # stand in place of a method or table of the class: attribute_map gives any key another name.
    machinery = {
        name
        for name in dir(base)
        if callable(getattr(base, name)) or isinstance(getattr(base, name), dict)
    }
    for level in _dictionaries(found):
        for key in list(level):
            if "implementation" in key or key.startswith("__") or key in {*machinery, *_KERNELS}:
                del level[key]
    with quiet(), tempfile.TemporaryDirectory(prefix="halfstep-") as checked:
        try:
            (Path(checked) / "config.json").write_text(json.dumps(found), encoding="utf-8")
            config = transformers.AutoConfig.from_pretrained(
                folder if trusted else checked, local_files_only=True, trust_remote_code=trusted
            )
        except Exception as error:  # transformers raises many kinds for a bad config
            raise CheckpointError(
                f"{folder / 'config.json'} is not one that transformers {transformers.__version__} "
                f"knows: {first_line(error)}"
            ) from error
    config.name_or_path = str(folder)
    # Nor is it taken from a folder whose own code is trusted: a kernel would be fetched for it.
    config._attn_implementation = config._experts_implementation = None
    return config


def _refuse_level(file: Path, level: dict[str, Any], tensors: int) -> None:
    """Refuses quantized weights, and sizes of which ``transformers`` makes lists first thing."""
    for key, value in level.items():
        if key in _QUANTIZED and value is not None:
            raise ConfigError(
                f"{file}: quantized weights ({key}) cannot be trained; take the model's "
                "unquantized folder"
            )
        most = 4 * tensors + 64 if _LAYERS.search(key) else 10**5 if key == "num_labels" else None
        if most is not None and isinstance(value, int) and value > most:
            shown = f"{value:,}" if value < 10**30 else "(a number of more than 30 digits)"
            raise CheckpointError(
                f"{file}: {key}={shown}, but the folder's weights are {tensors} tensors: "
                "config.json and weights are of different models"
            )


def _placed_by_index(folder: Path) -> dict[str, str]:
    """Which file holds each tensor, as the index has it; or an error that says what there is."""
    index, pickles = folder / INDEX, sorted(folder.glob("pytorch_model*.bin"))
    if not index.exists() and pickles:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when it is opened, and there is no "
            f"{WEIGHTS}. If you trust its source, convert it with transformers: "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder), or take a revision "
            "of the model that has safetensors"
        )
    if not index.exists():
        raise CheckpointError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} names no tensor: weight_map is missing or empty")
    for name in placed.values():
        # A name out of a file must not lead out of the folder: no separator, no leading dot.
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not a plain .safetensors file name")
    return placed


def _dictionaries(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A dictionary and all within it but those of labels; without recursion, whatever the depth."""
    rest: list[Any] = [found]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            yield value
            rest += [inner for key, inner in value.items() if key not in ("id2label", "label2id")]


def _texts(value: Any) -> Iterator[str]:
    """The strings of a setting that is a string, a list or a dictionary."""
    rest = [value]
    while rest:
        inner = rest.pop()
        if isinstance(inner, dict | list):
            rest += inner.values() if isinstance(inner, dict) else inner
        elif isinstance(inner, str):
            yield inner
