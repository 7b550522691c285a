"""Opens Hugging Face model folders without trusting them.

No code in a folder runs, no pickle is opened, and nothing that a file names is downloaded. JSON is
read and checked here, as some keys of ``config.json`` name code: transformers would fetch an
attention implementation from the hub and run it. Weights come from safetensors files only.
``transformers`` gets the checked settings and the tensors, never the folder, so that its other ways
to find weights (pickles, sharded training checkpoints, adapters, file names in ``config.json``) are
closed. Python code in the folder runs only if the user says that it is trusted.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained.hub import quiet, require_library, resolve_source

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"

_CODE = ("auto_map", "custom_pipelines", "custom_pipeline", "custom_generate")
"""Keys that name Python code to run."""
_QUANTIZED = ("quantization_config", "compression_config")
_DROPPED = ("use_kernels", "kernel_config", "allow_all_kernels", "fusion_config")
"""Keys that replace layers of the model; no model that is trained here needs them."""
_ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:", "local_dir:")
"""Prefixes that make ``timm``, which ``transformers`` uses for some models, load another source."""

_LAYERS = re.compile(r"(^|_)(n_layers?|layers|num_layers?|depth|num_hidden_groups)$")


@dataclass(frozen=True)
class PretrainedFolder:
    """A checked model folder, with its config and its weights in memory."""

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
        """Return the class that builds the model, or raise ConfigError saying ``what`` it lacks."""
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
    """Open and check the folder of a model.

    Args:
        source: A folder or a hub name (:func:`resolve_source`).
        trust_remote_code: Let the folder's own Python code run; refused otherwise.
        revision: Branch, tag or commit of a hub name.

    Raises:
        ConfigError: If the source cannot be had, brings code that is not trusted, or is quantized.
        CheckpointError: If a file is missing, damaged or a pickle.
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
    refuse_code(file, found, trust_remote_code)
    tensors = read_tensors(folder)
    for level in _dictionaries(found):
        if quantized := [key for key in _QUANTIZED if level.get(key)]:
            raise ConfigError(
                f"{file}: quantized weights ({quantized[0]}) cannot be trained; take the model's "
                "unquantized folder"
            )
        # of a huge number of layers or labels, transformers would make long lists
        for key, value in level.items():
            most = 4 * len(tensors) + 64 if _LAYERS.search(key) else 10**8
            if isinstance(value, int) and value > most:
                raise CheckpointError(
                    f"{file}: {key} does not fit the folder's {len(tensors)} tensors: config.json "
                    "and weights are of different models"
                )
    auto_map = (found.get("auto_map") or {}) if trust_remote_code else {}
    config = _config(folder, found, trusted=bool(auto_map))
    own_name = str(folder.resolve()) if Path(source).expanduser().is_dir() else os.fspath(source)
    return PretrainedFolder(own_name, folder, config, auto_map, tensors)


def refuse_code(file: Path, found: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a JSON file that asks for code, at any level of nesting.

    Trust covers the folder's own code only: code from elsewhere is always refused.

    Raises:
        ConfigError: If the file asks for Python code that is not trusted, for a kernel from the
            hub, or for another file to be read in its place.
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
    """Read a JSON object from a file, or raise CheckpointError, with the hint if it is missing."""
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
    """Read all tensors of a folder by name, from ``model.safetensors`` or its shards.

    Raises:
        CheckpointError: If there is no such file, or one is damaged.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} has no weights in {WEIGHTS}. A pickle (pytorch_model.bin), which can run "
            "code when it is opened, is not read: convert it where you trust it by "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder)"
        )
    tensors: dict[str, Tensor] = {}
    for file in [folder / WEIGHTS] if (folder / WEIGHTS).exists() else files:
        tensors |= read_safetensors(file)
    return tensors


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of one file, or raise CheckpointError."""
    try:
        # clone, as load_file returns views of the memory-mapped file, which may be replaced
        return {name: view.clone() for name, view in load_file(file).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is missing, damaged or not a safetensors file ({error}); copy it again"
        ) from error


def stored_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """Return the dtype that holds all stored floating tensors exactly; fp32 if there are none."""
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, kinds) if kinds else torch.float32


def first_line(error: Exception) -> str:
    """Return an error's message on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _config(folder: Path, found: dict[str, Any], *, trusted: bool) -> Any:
    """Make the config object from the checked settings, or by the folder's own trusted code."""
    transformers = require_library("transformers")
    base = transformers.PreTrainedConfig
    # Remove keys that choose how the model is computed, which halfstep decides, and keys that would
    # replace a method or table of the class, such as attribute_map, which renames keys.
    machinery = {
        name
        for name in dir(base)
        if callable(getattr(base, name)) or isinstance(getattr(base, name), dict)
    }
    for level in _dictionaries(found):
        for key in list(level):
            if "implementation" in key or key.startswith("__") or key in {*machinery, *_DROPPED}:
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
    # Reset it even where the folder's code is trusted, as a kernel would be fetched from the hub.
    config._attn_implementation = config._experts_implementation = None
    return config


def _dictionaries(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a dictionary and all nested in it except label tables, without recursion."""
    rest: list[Any] = [found]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            yield value
            rest += [inner for key, inner in value.items() if key not in ("id2label", "label2id")]


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings of a setting that is a string, a list or a dictionary."""
    rest = [value]
    while rest:
        inner = rest.pop()
        if isinstance(inner, dict | list):
            rest += inner.values() if isinstance(inner, dict) else inner
        elif isinstance(inner, str):
            yield inner
