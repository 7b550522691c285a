"""A model's modules and shapes without its numbers, built before any memory is taken for them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from halfstep.errors import CheckpointError, HalfstepError

Own = TypeVar("Own", bound=nn.Module)

_LAYERS = re.compile(r"(^|_)(n_layers?|layers|num_layers?|depth|num_hidden_groups)$")
_LABELS = 100_000
"""Most classes that a configuration may count without naming them."""
_SLACK_TENSORS = 64
_SLACK_ELEMENTS = 10**8


def refuse_more_layers(file: Path, level: Mapping[str, Any], tensors: int) -> None:
    """Refuses a number of layers that the weights cannot be of.

    ``transformers`` makes a list as long as that number before it builds anything.

    Args:
        file: For the error.
        level: A dictionary of the configuration, the outer one or one within it.
        tensors: How many the folder's weights are.

    Raises:
        CheckpointError: There are more layers than tensors.
    """
    for key, value in level.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and _LAYERS.search(key) and value > most_tensors(tensors):
            raise CheckpointError(
                f"{file}: {key}={_digits(value)}, but the folder's weights are {tensors} tensors: "
                "config.json and weights are of different models"
            )
        if whole and key == "num_labels" and value > _LABELS:
            raise CheckpointError(
                f"{file}: num_labels={_digits(value)} classes without names; allowed are {_LABELS}"
            )


def most_tensors(stored: int) -> int:
    """How many parameters a model may have whose folder stores this many.

    A new head's and those that one stored tensor is split into come on top of the stored ones.
    """
    return 4 * stored + _SLACK_TENSORS


def skeleton(
    folder: Path, model_class: Any, config: Any, tensors: Mapping[str, Tensor]
) -> nn.Module:
    """The model on torch's ``meta`` device: names and shapes, no memory.

    Args:
        folder: For the error.
        model_class: What to build.
        config: From what.
        tensors: The folder's weights, which say how large the model can be.

    Raises:
        CheckpointError: The configuration means far more weights than the folder holds.
        Exception: Whatever the model class raises for a configuration that makes no sense.
    """
    with bounded(folder, tensors), torch.device("meta"):
        found: nn.Module = model_class(config)
    return found


def own_skeleton(folder: Path, tensors: Mapping[str, Tensor], make: Callable[[], Own]) -> Own:
    """A model of ours on the ``meta`` device, if it is about as large as the weights.

    Args:
        folder: For the error.
        tensors: The folder's weights.
        make: Builds the model.

    Raises:
        CheckpointError: The model is far larger than the weights, or than torch can count.
    """
    try:
        with bounded(folder, tensors), torch.device("meta"):
            return make()
    except HalfstepError:
        raise
    except (OverflowError, RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"{folder / 'config.json'}: no such model can be: {why}") from error


def require_plain_files(folder: Path) -> None:
    """Refuse a folder with a pipe, a socket or a device in it: reading one would wait for ever.

    Raises:
        CheckpointError: Naming it.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path} is not a regular file; a model is read from plain files only: remove it"
            )


@contextmanager
def bounded(folder: Path, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Ends the building of modules by this thread where they are far larger than the weights.

    Args:
        folder: For the error.
        tensors: The weights that the modules are to take.

    Raises:
        CheckpointError: From within the block, at the parameter or buffer that is too much.
    """
    stored = sum(tensor.numel() for tensor in tensors.values())
    limits = most_tensors(len(tensors)), 3 * stored + _SLACK_ELEMENTS
    count = elements = 0
    own = threading.get_ident()

    def add(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal count, elements
        if tensor is None or threading.get_ident() != own:
            return
        count, elements = count + 1, elements + tensor.numel()
        if count > limits[0] or elements > limits[1]:
            raise CheckpointError(
                f"{folder / 'config.json'} means a model of more than {elements:,} weights in "
                f"{count} tensors; the folder holds {stored:,} in {len(tensors)}: configuration "
                "and weights are of different models"
            )

    hooks = (
        register_module_parameter_registration_hook(add),
        register_module_buffer_registration_hook(add),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _digits(value: int) -> str:
    """A whole number, which Python refuses to print where it has thousands of digits."""
    return f"{value:,}" if abs(value) < 10**30 else "(a number of more than 30 digits)"
