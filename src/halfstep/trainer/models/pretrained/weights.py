"""Tensors into ``transformers`` models and out again, with nothing drawn or dropped in silence."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import sync, sync_folder
from halfstep.trainer.models.pretrained.folder import (
    PretrainedFolder,
    first_line,
    quiet,
    read_json,
    require_finite,
)
from halfstep.trainer.models.pretrained.foreign_config import without_methods
from halfstep.trainer.models.pretrained.hub import require
from halfstep.trainer.models.pretrained.skeleton import skeleton

_GENERATION = "generation_config.json"
_DROPOUTS = {"dropout", "classifier_dropout", "classif_dropout"}


@dataclass(frozen=True)
class Loaded:
    """A model with what its folder lacked and what it had too much."""

    model: Any
    """The ``transformers`` model, in evaluation mode, on the CPU."""
    missing: tuple[str, ...]
    """Parameters that were drawn, sorted."""
    unused: tuple[str, ...]
    """Tensors of the folder that have no place in the model, sorted."""


def load_weights(
    folder: PretrainedFolder,
    model_class: Any,
    config: Any,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    seed: int = 0,
) -> Loaded:
    """A model with these tensors; parameters without one are drawn from ``seed``.

    The caller's generators are left as they are. Attention is ``sdpa`` where the model has it,
    else ``eager``, whatever ``config.json`` names (it may name code on the hub).

    Raises:
        CheckpointError: A tensor has another shape than its parameter, or holds NaN or inf.
        ConfigError: The model cannot be built.
    """
    _skeleton(folder, model_class, config, tensors)
    build = partial(_build, model_class, config, tensors, dtype, seed)
    try:
        try:
            model, info = build("sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, info = build("eager")
    except Exception as error:  # transformers raises many kinds
        raise _unbuilt(folder, model_class, error) from error
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise CheckpointError(
            f"{folder.folder}: tensor {name!r} has shape {tuple(stored)}, config.json means "
            f"{tuple(wanted)}"
        )
    if info["error_msgs"]:
        raise CheckpointError(f"{folder.folder}: {' '.join(str(info['error_msgs']).split())}")
    model.name_or_path = model.config.name_or_path = folder.name
    require_finite(model, folder.folder)
    if model.can_generate() and (folder.folder / _GENERATION).exists():
        model.generation_config = _generation_config(folder.folder)
    return Loaded(
        model, tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"]))
    )


def _build(
    model_class: Any,
    config: Any,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    seed: int,
    attention: str,
) -> tuple[Any, dict[str, Any]]:
    """The model and ``transformers``' account of names, without a trace in the caller's state."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,  # which load_weights reports by name
            output_loading_info=True,
        )
    return model, info


def _generation_config(folder: Path) -> Any:
    """How the model's author means it to generate."""
    settings = require("transformers").GenerationConfig
    found = without_methods(read_json(folder / _GENERATION, ""), settings)
    with quiet():
        try:
            return settings.from_dict(found)
        except Exception as error:  # transformers raises many kinds
            raise CheckpointError(f"{folder / _GENERATION}: {first_line(error)}") from error


def head_names(
    folder: PretrainedFolder, model_class: Any, config: Any, tensors: Mapping[str, Tensor]
) -> set[str]:
    """The names of tensors that are not the base model's: those of its head.

    Raises:
        ConfigError: The model cannot be built.
        CheckpointError: The configuration means far more weights than the folder holds.
    """
    found = _skeleton(folder, model_class, config, tensors)
    prefix = f"{found.base_model_prefix}."
    return {name for name in found.state_dict() if not name.startswith(prefix)}


def _skeleton(
    folder: PretrainedFolder, model_class: Any, config: Any, tensors: Mapping[str, Tensor]
) -> Any:
    """The model without memory, or an error of ours."""
    with quiet():
        try:
            return skeleton(folder.folder, model_class, config, tensors)
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise _unbuilt(folder, model_class, error) from error


def _unbuilt(folder: PretrainedFolder, model_class: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"{folder.folder}: {model_class.__name__} cannot be built: {first_line(error)}"
    )


def set_dropout(config: Any, dropout: float) -> None:
    """Sets every dropout probability of a ``transformers`` config, attention's too.

    Raises:
        ConfigError: ``dropout`` is not in [0, 1).
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be in [0, 1), got {dropout}")
    for key, value in config.to_dict().items():
        words = key.split("_")
        named = key in _DROPOUTS or any(w in ("dropout", "pdrop") for w in words)
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if named and (number or key == "classifier_dropout"):
            setattr(config, key, dropout)


def repeated_blocks(model: Any) -> list[nn.Module]:
    """The layers of a model in order: what to shard or checkpoint one by one.

    They are the modules that ``transformers`` must not split, as far as they stand in a list;
    where it names none, the members of the longest list of modules.
    """
    whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    # A sharded module's class is a new one with the old one among its bases.
    found = [
        member
        for each in lists
        for member in each
        if any(base.__name__ in whole for base in type(member).__mro__)
    ]
    return found or list(max(lists, key=len, default=[]))


def save_model(
    model_class: Any,
    model: Any,
    tensors: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a folder for ``from_pretrained``: ``config.json`` and safetensors.

    Args:
        model_class: Of the model, before anything wrapped it.
        model: For its config and generation config.
        tensors: By the names of ``model_class``'s ``state_dict``; tied ones are one object.
        folder: Must not exist, or be empty; appears complete or not at all.
        dtype: Of the floating tensors; None keeps theirs.

    Raises:
        CheckpointError: The folder is not empty or cannot be written, or a tensor is not finite
            (in ``dtype``).
    """
    cast: dict[int, Tensor] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in cast:
            to = dtype if tensor.is_floating_point() else None
            own = tensor.detach().to("cpu", to or tensor.dtype).contiguous()
            if own.is_floating_point() and not bool(torch.isfinite(own).all()):
                raise CheckpointError(
                    f"{folder}: tensor {name!r} holds NaN or inf as {own.dtype}; nothing was "
                    "written"
                )
            cast[id(tensor)] = own
        out[name] = cast[id(tensor)]
    kinds = {tensor.dtype for tensor in out.values() if tensor.is_floating_point()}
    written = kinds.pop() if len(kinds) == 1 else torch.float32
    with quiet(), torch.device("meta"):
        bare = model_class(model.config)  # without wrappers, hooks and adapters
    with new_folder(folder) as temporary:
        with quiet():
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                # One that contradicts itself is read by transformers, but not written.
                with suppress(ValueError):
                    model.generation_config.validate(strict=True)
                    bare.generation_config = model.generation_config
            bare.save_pretrained(temporary, state_dict=out)
        file = temporary / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config["dtype"] = str(written).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        mode = file.stat().st_mode
        for path in temporary.glob("*.safetensors"):
            path.chmod(mode)  # safetensors creates its files for the owner only


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under another name beside, which gets its name when the block ends without error.

    Raises:
        CheckpointError: ``folder`` exists and is not empty, or cannot be written.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; choose another name")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def named_state(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a module with ``weights`` in place of its parameters; tied ones are one object.

    Args:
        model: Whose ``state_dict`` names are wanted.
        weights: By parameter name with ``model.`` in front; those it lacks are the module's own.

    Raises:
        CheckpointError: ``weights`` has a name that is no parameter.
    """
    names = {id(p): f"model.{n}" for n, p in model.named_parameters()}
    unknown = sorted(set(weights) - set(names.values()))
    if unknown:
        raise CheckpointError(f"weights has {unknown[0]!r}, which is not a parameter of the model")
    return {
        key: weights.get(names.get(id(tensor), ""), tensor)
        for key, tensor in model.state_dict(keep_vars=True).items()
    }


def position_limit(model: Any) -> int | None:
    """How many tokens, special ones included, a model has positions for; None: no fixed number.

    RoBERTa and its kin number positions from ``padding_idx + 1``, which is lost to the text.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "wpe")):
            return module.num_embeddings - (
                0 if module.padding_idx is None else module.padding_idx + 1
            )
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
