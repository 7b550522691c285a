"""Checkpoints that are whole or not there, and that say so when a bit has flipped.

A checkpoint is a folder ``step-00000020``::

    weights.safetensors    what the optimizer updates: parameters, or fp32 masters
    optimizer.safetensors  "NAME/exp_avg" ...; "rng/cpu", "rng/cuda"
    state.json             step, tokens, precision state, configuration, tokenizer fingerprint
    manifest.json          SHA-256 of each of the above

It is written under a temporary name, every file and folder is synced, then it is renamed: a folder
with the final name is complete. No file format notices a flipped bit by itself, so loading checks
the manifest before anything is changed. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from halfstep.errors import CheckpointError, NonFiniteError
from halfstep.files import sync, sync_folder
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.moments import BROKEN
from halfstep.optim.state import REMAINDER, TOPS, in_dtype

FORMAT = 1
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".unfinished-"  # being written or being removed


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a checkpoint holds.

    Attributes:
        weights: Parameter name to tensor.
        optimizer: ``"NAME/KEY"`` to tensor, and random-number states under ``"rng/"``.
        state: Plain JSON values.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run's ``checkpoints`` folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``.

    Args:
        folder: The run's ``checkpoints`` folder; made if absent.
        step: Optimizer steps taken.
        checkpoint: What to write; every weight and moment must be finite.
        keep: How many to keep, at least 1; none is removed before the new one is safely there.

    Returns:
        The checkpoint's folder.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf; nothing is written or removed, so the
            last finite checkpoint stays.
        CheckpointError: If it cannot be written (full disk, no permission); nothing half-made and
            nothing removed.
    """
    _require_finite(checkpoint)
    final = folder / f"step-{step:08d}"
    if final.exists():
        return final
    temporary = folder / f"{_TEMPORARY}{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
            shutil.rmtree(leftover)
        temporary.mkdir()
        safetensors.torch.save_file(_storable(checkpoint.weights), temporary / WEIGHTS)
        safetensors.torch.save_file(_storable(checkpoint.optimizer), temporary / OPTIMIZER)
        (temporary / STATE).write_text(json.dumps({"format": FORMAT, **checkpoint.state}, indent=1))
        files = {n: {"sha256": _sha256(temporary / n)} for n in (WEIGHTS, OPTIMIZER, STATE)}
        (temporary / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        sync_folder(temporary)
        os.rename(temporary, final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = list_checkpoints(folder)
        last = f"the last checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier one"
        raise CheckpointError(
            f"checkpoint {final} cannot be written: {error}; {last}. Free space or move the run's "
            "folder to another disk, then go on with --resume"
        ) from error
    for old in list_checkpoints(folder)[:-keep]:
        try:  # renamed first: a kill leaves no half of one
            shutil.rmtree(old.rename(folder / f"{_TEMPORARY}{old.name}"))
        except OSError as error:
            raise CheckpointError(f"old checkpoint {old} cannot be removed: {error}") from error
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every file against the manifest.

    Raises:
        CheckpointError: If it is missing, incomplete, damaged, foreign or of a newer format; the
            message names the file.
    """
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST}: format {manifest.get('format')!r}, this halfstep reads {FORMAT}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise CheckpointError(f"{path / MANIFEST}: not a halfstep checkpoint manifest")
    for name, expected in files.items():
        try:
            actual = _sha256(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name}: cannot be read: {error}") from error
        if actual != expected.get("sha256"):
            raise CheckpointError(
                f"{path / name}: contents do not match the manifest: the file is damaged. Remove "
                f"{path} to go on from the checkpoint before it"
            )
    try:
        return Checkpoint(
            safetensors.torch.load_file(path / WEIGHTS),
            safetensors.torch.load_file(path / OPTIMIZER),
            _read_json(path / STATE),
        )
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _require_finite(checkpoint: Checkpoint) -> None:
    for tensors in (checkpoint.weights, checkpoint.optimizer):
        for name, tensor in tensors.items():
            broken = tensor.is_floating_point() and not bool(tensor.isfinite().all())
            if broken or (name.endswith(TOPS) and bool((tensor == BROKEN).any())):
                raise NonFiniteError(
                    f"{name} is not finite: no checkpoint is written from it, and the last one "
                    "stays as it is",
                    cause="weights",
                    parameters=(name,),
                )


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a halfstep checkpoint file")
    return value


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, Tensor]:
    """The optimizer's state as ``"NAME/KEY"`` to tensor, without what the weights hold already."""
    return {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if key != REMAINDER
    }


def convert_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: dict[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    """The state that :func:`optimizer_tensors` saved, in this optimizer's formats.

    Each tensor comes to its parameter's device, and moments of another format are converted;
    ``Optimizer.load_state_dict`` would cast all of them to the parameter's dtype, this keeps bits.

    Raises:
        PrecisionError: If a moment is missing or of another shape.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    saved: dict[nn.Parameter, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = parameters[name]
        # A fused AdamW keeps its step counter beside the parameter, as it keeps the moments.
        saved.setdefault(parameter, {})[key] = tensor.to(parameter.device)
    if isinstance(optimizer, LowPrecisionOptimizer):
        return {
            parameter: optimizer.convert(parameter, state) for parameter, state in saved.items()
        }
    return {parameter: in_dtype(state, parameter.dtype) for parameter, state in saved.items()}


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, states: Mapping[Tensor, dict[str, Any]]
) -> None:
    """Take converted states; remainders, which belong to the weights, stay."""
    held = {p: state[REMAINDER] for p, state in optimizer.state.items() if REMAINDER in state}
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for parameter, remainder in held.items():
        optimizer.state[parameter][REMAINDER] = remainder


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Torch's random-number states, as byte tensors."""
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


def load_rng_tensors(device: torch.device, tensors: dict[str, Tensor]) -> None:
    """Put :func:`rng_tensors` back."""
    torch.set_rng_state(tensors["rng/cpu"])
    if device.type == "cuda" and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"], device)
