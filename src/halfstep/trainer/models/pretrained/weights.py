"""Loads tensors into ``transformers`` models and saves them, with no silent init or drop."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import sync, sync_folder
from halfstep.precision.scaling.gradients import is_finite
from halfstep.trainer.models.pretrained.folder import PretrainedFolder, first_line, read_json_object
from halfstep.trainer.models.pretrained.hub import quiet, require_library

_GENERATION = "generation_config.json"
_DROPOUTS = {"dropout", "classifier_dropout", "classif_dropout"}


class Pretrained(nn.Module):
    """A ``transformers`` model with a task's loss; parameters are named ``model.<their name>``.

    Attributes:
        model: The ``transformers`` module, perhaps wrapped.
        model_class: Its class, before anything wraps it.
        max_length: Maximal tokens of a row, special ones included; None: no fixed limit.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.model_class = type(model)
        self.max_length = position_limit(model)
        self.train()

    @property
    def core(self) -> Any:
        """The ``transformers`` module without what wraps it."""
        return self.model

    def blocks(self) -> list[nn.Module]:
        """Return the layers in order, to be sharded one by one."""
        return repeated_blocks(self.core)

    def save_(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        merge: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a folder that ``from_pretrained`` and the function that opened this model read.

        Args:
            folder: Must not exist, or be empty; appears complete or not at all.
            weights: Tensors by parameter name; missing ones are taken from this module.
            merge: Ignored, as there are no adapters to merge.
            dtype: Dtype of the written weights; None keeps those of ``weights``.

        Raises:
            CheckpointError: If the folder cannot be written, or a weight is not finite in
                ``dtype``.
        """
        every = all_parameters(self.model, weights)
        names = {id(p): f"model.{n}" for n, p in self.model.named_parameters()}
        state = {  # tied weights are one object
            key: every[names[id(tensor)]] if id(tensor) in names else tensor
            for key, tensor in self.model.state_dict(keep_vars=True).items()
        }
        save_model(self.model_class, self.core, state, Path(folder), dtype)


def load_weights(
    folder: PretrainedFolder,
    model_class: Any,
    dtype: torch.dtype,
    *,
    dropout: float | None = None,
    head: Literal["needed", "kept", "new"] = "needed",
    seed: int = 0,
) -> tuple[Any, tuple[str, ...]]:
    """Build a model with the folder's tensors, in evaluation mode on the CPU.

    The caller's generators are not touched. ``transformers`` gets the tensors, not the folder, and
    does the renaming, splitting and tying that the architecture needs. ``head`` says whether the
    folder must have a head, may have one, or a new one is drawn from ``seed``. Returns the model
    and the sorted names of the parameters that were drawn.

    Raises:
        CheckpointError: If a tensor is missing, of another shape, or holds NaN or inf.
        ConfigError: If the model cannot be built.
    """
    if dropout is not None:
        set_dropout(folder.config, dropout)
    of_head = _names_of_head(folder, model_class)
    kept = {n: t for n, t in folder.tensors.items() if head != "new" or n not in of_head}
    with _built(folder, model_class), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = model_class.from_pretrained(
            None,
            config=folder.config,
            state_dict=kept,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported by name below
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    # A checkpoint of masked language modelling has no pooler, which is a part of the head.
    lost = [n for n in missing if head == "needed" or (n not in of_head and ".pooler." not in n)]
    lost += [f"{name} (another shape)" for name, *_ in sorted(info["mismatched_keys"])]
    if lost or info["error_msgs"]:
        raise CheckpointError(
            f"{folder.folder} lacks {len(lost)} weights of the model, such as "
            f"{', '.join(lost[:5])}: config.json and weights are of different models"
            + " ".join(["", *info["error_msgs"]])
        )
    model.name_or_path = model.config.name_or_path = folder.name
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise CheckpointError(f"{folder.folder}: tensor {name!r} holds NaN or inf")
    for module in model.modules():
        if dropout is not None and isinstance(module, nn.Dropout):
            module.p = dropout  # also in layers that no setting of the config covers
    _set_generation_config_(model, folder.folder)
    return model, tuple(missing)


def _names_of_head(folder: PretrainedFolder, model_class: Any) -> set[str]:
    """Name the head's tensors; refuse far more weights than are stored before they are made."""
    with _built(folder, model_class), torch.device("meta"):
        bare = model_class(folder.config)
    wanted = sum(parameter.numel() for parameter in bare.parameters())
    stored = sum(tensor.numel() for tensor in folder.tensors.values())
    if wanted > 3 * stored + 10**8:  # a new head is allowed for
        raise CheckpointError(
            f"{folder.folder / 'config.json'} means a model of {wanted:,} weights; the folder "
            f"holds {stored:,}: configuration and weights are of different models"
        )
    return {n for n in bare.state_dict() if not n.startswith(f"{bare.base_model_prefix}.")}


@contextmanager
def _built(folder: PretrainedFolder, model_class: Any) -> Iterator[None]:
    """Turn whatever ``transformers`` raises while it builds a model into a ConfigError."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise ConfigError(
            f"{folder.folder}: {model_class.__name__} cannot be built: {first_line(error)}"
        ) from error


def _set_generation_config_(model: Any, folder: Path) -> None:
    """Take the folder's generation settings, without entries that would replace a method."""
    if not (model.can_generate() and (folder / _GENERATION).exists()):
        return
    settings = require_library("transformers").GenerationConfig
    found = read_json_object(folder / _GENERATION)
    with quiet():
        model.generation_config = settings.from_dict(
            {
                key: value
                for key, value in found.items()
                if not key.startswith("__") and not callable(getattr(settings, key, None))
            }
        )


def set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout probability of a ``transformers`` config, attention's too."""
    for key, value in config.to_dict().items():
        words = key.split("_")
        named = key in _DROPOUTS or any(w in ("dropout", "pdrop") for w in words)
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if named and (number or key == "classifier_dropout"):
            setattr(config, key, dropout)


def repeated_blocks(model: Any) -> list[nn.Module]:
    """Return the layers of a model in order, to be sharded or checkpointed one by one.

    They are the members of module lists that ``transformers`` names in ``_no_split_modules``; if it
    names none, the members of the longest module list.
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
    """Write a folder for ``from_pretrained``: ``config.json`` and safetensors.

    Args:
        model_class: Class of the model, before anything wrapped it.
        model: The model, for its config and generation config.
        tensors: Tensors by names of ``model_class``'s ``state_dict``; tied ones are one object.
        folder: Must not exist, or be empty; appears complete or not at all.
        dtype: Dtype of floating tensors; None keeps theirs.

    Raises:
        CheckpointError: If the folder is not empty or cannot be written, or a tensor is not finite
            (in ``dtype``).
    """
    cast: dict[int, Tensor] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in cast:
            to = dtype if tensor.is_floating_point() else None
            own = tensor.detach().to("cpu", to or tensor.dtype).contiguous()
            if own.is_floating_point() and not is_finite(own):
                raise CheckpointError(
                    f"{folder}: tensor {name!r} holds NaN or inf as {own.dtype}; nothing was "
                    "written"
                )
            cast[id(tensor)] = own
        out[name] = cast[id(tensor)]
    kinds = {tensor.dtype for tensor in out.values() if tensor.is_floating_point()}
    written = kinds.pop() if len(kinds) == 1 else torch.float32
    with quiet(), torch.device("meta"):
        # without wrappers, hooks and adapters; its dtype is what config.json will name
        bare = model_class(model.config).to(written)
    with new_folder(folder) as temporary:
        with quiet():
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                # One that contradicts itself is read by transformers, but not written.
                with suppress(ValueError):
                    model.generation_config.validate(strict=True)
                    bare.generation_config = model.generation_config
            bare.save_pretrained(temporary, state_dict=out)
        mode = (temporary / "config.json").stat().st_mode
        for path in temporary.glob("*.safetensors"):
            path.chmod(mode)  # safetensors creates its files for the owner only


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder`` if the block ends without error.

    Raises:
        CheckpointError: If ``folder`` exists and is not empty, or cannot be written.
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


def all_parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Complete ``weights``, whose names begin with ``model.``, by the module's own parameters.

    Raises:
        CheckpointError: If ``weights`` has a name that is not a parameter.
    """
    own = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise CheckpointError(f"weights has {unknown[0]!r}, which is not a parameter of the model")
    return {**own, **weights}


def position_limit(model: Any) -> int | None:
    """Return the number of positions for a text's tokens, special ones included; None: no limit.

    RoBERTa and its relatives number positions from ``padding_idx + 1``, so they have fewer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "wpe")):
            return module.num_embeddings - (
                0 if module.padding_idx is None else module.padding_idx + 1
            )
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
