"""What the JSON files of a stranger's model folder may say, and what they may not.

``transformers`` turns ``config.json`` into an object by setting an attribute for each key, and some
of these attributes name code: an attention implementation is looked up on the hub and run. So each
dictionary of such a file, nested ones too, is checked here before any object is made from it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained.hub import require

IMPLEMENTATIONS = ("eager", "sdpa")
"""The attention implementations that a folder may ask for: torch's own."""

_LABELS = {"id2label", "label2id"}
"""Dictionaries whose keys are the user's words."""
_CODE = {"auto_map", "custom_pipelines", "custom_pipeline", "custom_generate"}
"""Keys that name Python files."""
_QUANTIZED = {"quantization_config", "compression_config"}
_KERNELS = {"use_kernels", "kernel_config", "allow_all_kernels", "fusion_config"}
"""Keys that replace layers of the model; nothing that is trained here needs them."""
_ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:", "local_dir:")
"""How ``timm``, which ``transformers`` calls for some models, is told to look elsewhere."""
_MISSING_PARTS = "transformers.utils.dummy_"
"""Modules of the stand-ins for classes whose libraries are not installed."""


def refuse_code(file: Path, found: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuses a JSON file that asks for code, on whatever level.

    Args:
        file: For the error.
        found: Its content.
        trust_remote_code: Whether Python files of the folder itself may run. Code from elsewhere
            is refused all the same.

    Raises:
        ConfigError: The file asks for Python that is not trusted, for a kernel of the hub, for
            another file in its place, or for a class that is no tokenizer.
        CheckpointError: A value that cannot be what its key means.
    """
    if found.get("configuration_files"):
        raise ConfigError(
            f"{file}: configuration_files would have another file read in its place; remove the key"
        )
    for level in dictionaries(found):
        asked = sorted(key for key in _CODE & set(level) if level[key])
        if asked and not trust_remote_code:
            raise ConfigError(
                f"{file}: {asked[0]} asks to run Python code that comes with the model. Nothing of "
                "it was run. If you have read and trust it, pass trust_remote_code "
                f"(--trust-remote-code); or remove {asked[0]} to use transformers' own class of "
                "this model_type"
            )
        for key, value in level.items():
            if _is_implementation(key):
                _refuse_kernel(file, key, value)
            if isinstance(value, str) and value.lower().startswith(_ELSEWHERE):
                raise ConfigError(
                    f"{file}: {key}={_short(value)} names a model in another place; a folder must "
                    "hold its model itself"
                )
    _refuse_class(file, found.get("tokenizer_class"))


def refuse_quantized(file: Path, found: dict[str, Any]) -> None:
    """Raises ConfigError where a model, or a part of it, is stored quantized."""
    for level in dictionaries(found):
        for key in sorted(_QUANTIZED & set(level)):
            if level[key] is not None:
                raise ConfigError(
                    f"{file}: quantized weights ({key}) cannot be trained; take the model's "
                    "unquantized folder"
                )


def without_code(found: dict[str, Any]) -> dict[str, Any]:
    """What is left of a configuration when all that can name code is taken out, in place.

    Taken out are implementations other than :data:`IMPLEMENTATIONS`, settings of kernels, and keys
    that would replace a method or table of ``transformers``' config class itself: ``attribute_map``
    gives any key another name.
    """
    machinery = _machinery(require("transformers").PreTrainedConfig)
    for level in dictionaries(found):
        for key in list(level):
            unsafe = _is_implementation(key) and level[key] not in IMPLEMENTATIONS
            if unsafe or key in machinery or key in _KERNELS or key.startswith("__"):
                del level[key]
    return found


def without_methods(found: dict[str, Any], settings: type) -> dict[str, Any]:
    """The entries that do not stand in place of a class's own methods."""
    return {
        key: value
        for key, value in found.items()
        if not key.startswith("__") and not callable(getattr(settings, key, None))
    }


def reset_implementations(config: Any) -> None:
    """Leaves the choice of attention and experts of a config object to ``transformers``.

    The objects inside are reset one by one: which keys are sub-configurations is itself a setting.
    """
    base, seen, rest = require("transformers").PreTrainedConfig, set(), [config]
    while rest:
        found = rest.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, base):
            attributes = vars(found)
            for key in [key for key in attributes if _is_implementation(key)]:
                if attributes[key] not in (None, *IMPLEMENTATIONS):
                    attributes[key] = None
            rest += attributes.values()
        elif isinstance(found, dict):
            rest += found.values()
        elif isinstance(found, list | tuple):
            rest += found


def dictionaries(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A dictionary and all within it but those of labels; without recursion, whatever the depth."""
    rest: list[Any] = [found]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            yield value
            rest += [inner for key, inner in value.items() if key not in _LABELS]


def _is_implementation(key: str) -> bool:
    """Whether a key chooses what computes attention or experts, under any of its names."""
    return "implementation" in key


def _refuse_kernel(file: Path, key: str, value: Any) -> None:
    """Raises ConfigError for an implementation that is looked up on the hub."""
    rest: list[Any] = [value]
    while rest:
        asked = rest.pop()
        if isinstance(asked, dict):
            rest += asked.values()
        elif isinstance(asked, list):
            rest += asked
        # transformers' spelling: owner/name, perhaps @revision and :function; "paged|" before it.
        elif isinstance(asked, str) and re.search(r"[/:@|\\]", asked):
            raise ConfigError(
                f"{file}: {key}={_short(asked)} asks to fetch and run code from the hub. Nothing "
                f"of it was fetched; allowed are {', '.join(IMPLEMENTATIONS)}, so remove the key"
            )


def _refuse_class(file: Path, name: Any) -> None:
    """Raises for a tokenizer_class that is something else: any class of the library can be named.

    Raises:
        ConfigError: The class is not a tokenizer.
        CheckpointError: The name is not one.
    """
    if name is None:
        return
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w{0,99}", name):
        raise CheckpointError(f"{file}: tokenizer_class={_short(name)} is not the name of a class")
    transformers = require("transformers")
    named = transformers.models.auto.tokenization_auto.tokenizer_class_from_name(name)
    kind = transformers.PreTrainedTokenizerBase
    tokenizer = isinstance(named, type) and issubclass(named, kind)
    stand_in = getattr(named, "__module__", "").startswith(_MISSING_PARTS)
    if named is not None and not tokenizer and not (stand_in and "Tokenizer" in name):
        raise ConfigError(f"{file}: tokenizer_class={name!r} is not a tokenizer of transformers")


def _machinery(config_class: Any) -> set[str]:
    """Names of a config class that are neither settings nor properties."""
    settings = {"model_type"}
    if dataclasses.is_dataclass(config_class):  # else its settings are no attributes of the class
        settings |= {field.name for field in dataclasses.fields(config_class)}
    return {
        name
        for name in dir(config_class)
        if name not in settings and not isinstance(getattr(config_class, name, None), property)
    }


def _short(value: Any) -> str:
    """A value for an error, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
