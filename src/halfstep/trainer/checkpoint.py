"""Writes checkpoints atomically, and refuses on loading any in which a bit has flipped.

A checkpoint is a folder ``step-00000020``::

    weights.safetensors    what the optimizer updates: parameters, or fp32 masters
    optimizer.safetensors  "NAME/exp_avg" ...
    state.json             step, tokens, precision state, configuration, tokenizer fingerprint
    manifest.json          SHA-256 of each of the above, and the index of tensors

N ranks write shards, in any layout, and any number of ranks reads them: ``shards.py``. Every rank
writes its files into ``.unfinished-step-00000100``. Then rank 0 checks that the shards
make up every tensor, writes the manifest, syncs it, and renames the folder: ``step-00000100``
exists completely or not at all.

No file format detects a flipped bit by itself, so loading checks every file that it reads against
the manifest before anything is changed. Nothing is ever unpickled: ``torch.distributed.checkpoint``
is not used because it reads its ``.metadata`` with an unrestricted unpickler, which runs code from
the file (observed with torch 2.13).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError
from halfstep.files import MANIFEST, read_json, require_sha256, sync, sync_folder
from halfstep.optim.state import tops_of
from halfstep.trainer.shards import (
    FORMAT,
    OPTIMIZER,
    SECTIONS,
    STATE,
    WEIGHTS,
    LocalShard,
    Reader,
    SavedTensor,
    Shard,
    first_nonfinite,
    read_manifest,
    write_shards,
)

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
_TEMPORARY = ".unfinished-"  # prefix of folders that are being written or removed
_NAME = re.compile(r"step-(\d{8,})")

AVERAGE, BUFFER = "ema", "buffer"
"""The KEY in ``NAME/KEY`` of tensors saved beside the optimizer's: averaged weights, buffers."""
EXPORTED = (AVERAGE, BUFFER)
"""What :func:`exported` needs of a checkpoint, besides its weights."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint in memory, or this rank's shards of them.

    Attributes:
        weights: Parameter name to tensor.
        optimizer: ``"NAME/KEY"`` to tensor.
        state: Plain JSON values; where several ranks save, rank 0's are written. A save adds
            ``"step"`` if it is missing.
        shards: Parameter name to the shard that its tensors hold. A parameter's moments hold the
            same shard, its step counter is whole. A tensor without an entry is whole, and rank 0
            writes it.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    shards: Mapping[str, Shard] = field(default_factory=dict)

    def written(self, rank: int) -> dict[str, list[LocalShard]]:
        """Collect what a rank writes, by section; it shares memory with the tensors."""
        weights = [
            LocalShard(name, tensor, self._shard(name, tensor, rank))
            for name, tensor in self.weights.items()
        ]
        tops = {tops_of(key) for key in self.optimizer}
        optimizer = [
            LocalShard(
                key,
                tensor,
                self._shard(key.rpartition("/")[0], tensor, rank),
                self.optimizer.get(tops_of(key)),
            )
            for key, tensor in self.optimizer.items()
            if key not in tops  # block tops are written along with their codes
        ]
        owned = {WEIGHTS: weights, OPTIMIZER: optimizer}
        return {name: [each for each in e if each.shard.written] for name, e in owned.items()}

    def _shard(self, name: str, tensor: Tensor, rank: int) -> Shard:
        """The shard of a parameter's tensor, which may be whole where the parameter is not."""
        shard = self.shards.get(name)
        if shard is None or tensor.dim() == 0:
            return Shard.whole(tensor.shape, written=rank == 0)
        if tuple(tensor.shape) != shard.local == shard.shape:
            return Shard.whole(tensor.shape, written=shard.written)
        return shard


class Exported(NamedTuple):
    """The exportable part of a checkpoint, by name: fp32 weights and the modules' buffers."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def by_kind(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Split a checkpoint's tensors into moments by path, and averages and buffers by name."""
    moments: dict[str, Tensor] = {}
    others: dict[str, dict[str, Tensor]] = {AVERAGE: {}, BUFFER: {}}
    for path, tensor in tensors.items():
        name, _, kind = path.rpartition("/")
        if kind in others:
            others[kind][name] = tensor
        else:
            moments[path] = tensor
    return moments, others[AVERAGE], others[BUFFER]


def exported(checkpoint: Checkpoint) -> Exported:
    """Return a checkpoint's weights for export: their averages, where the run kept some."""
    _, averages, buffers = by_kind(checkpoint.optimizer)
    weights = {name: averages.get(name, w).float() for name, w in checkpoint.weights.items()}
    return Exported(weights, buffers)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path that a step's checkpoint has, whether or not it exists."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run's ``checkpoints`` folder, oldest first.

    A folder without a manifest does not count: a save renames its folder with the manifest in it.
    """
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if os.path.lexists(path / MANIFEST)]


# Reading.


def load_checkpoint(
    path: Path, wanted: Mapping[str, Shard] | None = None, kinds: Collection[str] | None = None
) -> Checkpoint:
    """Read a checkpoint, or a rank's shards of it, whatever layout saved it.

    Every file is checked against its SHA-256 before anything is read from it, and only the files
    that hold some of what is wanted are read, so that N ranks need not each read everything. A
    moment in 8-bit codes comes with its block tops, bit for bit, if its shard is one that a rank
    saved; otherwise decoded to fp32, which :meth:`Session.restore` converts to the run's format.

    Args:
        path: The checkpoint's folder.
        wanted: For every parameter, the shard that this rank holds; its moments are read in the
            same shard. None reads whole tensors.
        kinds: The KEYs of the optimizer's tensors ``NAME/KEY`` that are read; None reads them all.

    Raises:
        CheckpointError: If it is missing, incomplete, damaged, foreign, of a newer format or,
            where shards are wanted, of another model.
    """
    manifest = read_manifest(read_json(path / MANIFEST), path / MANIFEST)
    require_sha256(path / STATE, manifest.files[STATE])
    state = read_json(path / STATE)
    if wanted is not None:
        _require_model(path, manifest.tensors[WEIGHTS], wanted)
    found: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    with ExitStack() as stack:
        reader = Reader(path, manifest, stack)
        for section, tensors in found.items():
            for name, saved in manifest.tensors[section].items():
                parameter, _, kind = name.rpartition("/")
                if section == WEIGHTS:
                    parameter = name
                elif kinds is not None and kind not in kinds:
                    continue
                shard = (wanted or {}).get(parameter)
                whole = shard is None or not saved.shape or shard.local == shard.shape
                tensors |= reader.tensor(section, name, None if whole else shard)
    return Checkpoint(found[WEIGHTS], found[OPTIMIZER], state, dict(wanted or {}))


def _require_model(
    path: Path, saved: Mapping[str, SavedTensor], wanted: Mapping[str, Shard]
) -> None:
    odd = sorted(set(saved) ^ set(wanted)) or [
        f"{name} is {entry.shape}, the model's {wanted[name].shape}"
        for name, entry in saved.items()
        if entry.shape != wanted[name].shape
    ]
    if odd:
        raise CheckpointError(f"{path}: made by another model: {', '.join(odd[:5])}")


# Writing.


def save_checkpoint(
    folder: Path,
    step: int,
    checkpoint: Checkpoint,
    keep: int,
    world: World = World(),  # noqa: B008  (frozen)
    spared: int | None = None,
) -> Path:
    """Write a checkpoint and remove old ones; all ranks call it together.

    Of the older ones, the newest ``keep`` stay, and that of the step ``spared``; none is removed
    before the new one is complete.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf on any rank.
        CheckpointError: If any rank's files cannot be written. No incomplete checkpoint stays, and
            no other is removed.
    """
    final = checkpoint_path(folder, step)
    temporary = folder / f"{_TEMPORARY}{final.name}"
    world.main_only(lambda: _begin(temporary, final))
    reports = world.gather(_written(checkpoint, step, temporary, world))
    try:
        _require_good(reports, final)
        world.main_only(lambda: _commit(temporary, final, reports))
    except HalfstepError:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    best = checkpoint_path(folder, step if spared is None else spared)
    world.main_only(lambda: _prune(folder, keep, {final, best}))
    return final


def _begin(temporary: Path, final: Path) -> None:
    """Make the folder to write into, and remove what killed saves left."""
    for path in final.parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)  # what cannot be removed is no reason not to save
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _unwritten(final, str(error)) from error


def _written(checkpoint: Checkpoint, step: int, temporary: Path, world: World) -> dict[str, Any]:
    """Write a rank's files; return a report on them, or on why they could not be written."""
    try:
        shards = checkpoint.written(world.rank)
        if broken := first_nonfinite(shards):
            return {"nonfinite": broken}
        state = json.dumps({"step": step, **checkpoint.state}, indent=1)
        return write_shards(shards, state, temporary, world.rank, world.size)
    except (OSError, SafetensorError, CheckpointError) as error:
        return {"error": str(error)}


def _commit(temporary: Path, final: Path, reports: list[dict[str, Any]]) -> None:
    """Write the manifest, and give the folder its name."""
    manifest = _merged(reports)
    read_manifest(manifest, final / MANIFEST)
    try:
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        sync_folder(temporary)
        os.rename(temporary, final)
        sync(final.parent)
    except OSError as error:
        raise _unwritten(final, str(error)) from error


def _merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' reports into one manifest."""
    manifest: dict[str, Any] = {"format": FORMAT, "files": {}, **{s: {} for s in SECTIONS}}
    for report in reports:
        manifest["files"] |= report["files"]
        for section in SECTIONS:
            for name, entry in report[section].items():
                whole = manifest[section].setdefault(name, {**entry, "pieces": []})
                whole["pieces"] += entry["pieces"]
    return manifest


def _require_good(reports: list[dict[str, Any]], final: Path) -> None:
    """Raise the error in one of the reports, if there is one."""
    broken = tuple(dict.fromkeys(r["nonfinite"] for r in reports if "nonfinite" in r))
    if broken:
        raise NonFiniteError(
            f"{broken[0]} is not finite: no checkpoint is written from it, and the last one stays "
            "as it is",
            cause="weights",
            parameters=broken,
        )
    for rank, report in enumerate(reports):
        if "error" in report:
            whose = f"rank {rank}: " if len(reports) > 1 else ""
            raise _unwritten(final, f"{whose}{report['error']}")


def _unwritten(final: Path, why: str) -> CheckpointError:
    kept = list_checkpoints(final.parent)
    last = f"the last checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier one"
    return CheckpointError(
        f"checkpoint {final} cannot be written: {why}; {last}. Free space or move the run's folder "
        "to another disk, then go on with --resume"
    )


def _prune(folder: Path, keep: int, spared: Collection[Path]) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        if old in spared:
            continue
        try:  # rename first, so that a kill leaves no half-deleted checkpoint under its name
            shutil.rmtree(old.rename(folder / f"{_TEMPORARY}{old.name}"))
        except OSError as error:
            raise CheckpointError(f"old checkpoint {old} cannot be removed: {error}") from error
