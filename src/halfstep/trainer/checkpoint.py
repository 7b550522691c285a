"""Writes checkpoints atomically, and refuses on loading any in which a bit has flipped.

A checkpoint is a folder ``step-00000020``, on a disk or in an object store::

    shard-00001-model-00001.safetensors ...  weights, or fp32 masters, and "NAME/exp_avg" ...
    index-00001.json ...   where each rank's tensors are: ``shards.py``
    state.json             step, tokens, precision state, configuration, tokenizer fingerprint
    manifest.json          SHA-256 of state.json and of each index, which has those of its files

N ranks write their shards, in any layout, and any number of ranks reads them. On a disk every rank
writes into ``.unfinished-step-00000020``, and at last rank 0 renames the folder; an object store
has no rename, and there a folder without a manifest, which comes last, does not count. So
``step-00000020`` exists completely or not at all.

``torch.distributed.checkpoint``'s ``HuggingFaceStorageReader`` reads the folder, and its planner
says here which part of which file a rank needs. But it checks no hash, reads the header of every
file on every rank, and leaves zeros where a file is missing, so that reading is ours: no file is
used before its SHA-256 was compared. Its own format is not used because its ``.metadata`` is read
with an unrestricted unpickler, which runs code from the file (observed with torch 2.13).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError, StorageError
from halfstep.files import MANIFEST, parse_json
from halfstep.trainer import old_checkpoint, storage
from halfstep.trainer.shards import (
    OPTIMIZER,
    SECTIONS,
    WEIGHTS,
    Index,
    LocalShard,
    Part,
    Saved,
    Shard,
    read_index,
    write_shards,
)
from halfstep.trainer.storage import Where, below

FORMAT = 3
CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
_STATE = "state.json"
_TEMPORARY = ".unfinished-"  # prefix of folders that are being written or removed
_DAMAGED = "damaged-"
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

    def written(self, rank: int) -> Iterator[LocalShard]:
        """Yield what a rank writes; it shares memory with the tensors."""
        for section, tensors in ((WEIGHTS, self.weights), (OPTIMIZER, self.optimizer)):
            for name, tensor in tensors.items():
                parameter = name if section == WEIGHTS else name.rpartition("/")[0]
                shard = self._shard(parameter, tensor, rank)
                if shard.written:
                    yield LocalShard(section, name, tensor, shard)

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


def checkpoint_path(folder: Where, step: int) -> Any:
    """Return the path or URL that a step's checkpoint has, whether or not it exists."""
    return below(folder, f"step-{step:08d}")


def list_checkpoints(folder: Where) -> list[Any]:
    """List the complete checkpoints of a run's ``checkpoints`` folder, oldest first.

    A folder without a manifest does not count: it is what comes last of a save.
    """
    found = [(int(m[1]), name) for name in storage.names(folder) if (m := _NAME.fullmatch(name))]
    paths = [below(folder, name) for _, name in sorted(found)]
    return [path for path in paths if MANIFEST in storage.names(path)]


def set_aside(path: Where) -> None:
    """Rename a damaged checkpoint, so that another of its step can be written."""
    parent, _, name = str(path).rpartition("/")
    aside = below(parent, _DAMAGED + name)
    if storage.names(aside):
        storage.remove(aside)
    storage.move(path, aside)


# Reading.


def load_checkpoint(
    path: Where,
    wanted: Mapping[str, Shard] | None = None,
    kinds: Collection[str] | None = None,
    world: World = World(),  # noqa: B008  (frozen)
) -> Checkpoint:
    """Read a checkpoint, or a rank's shards of it, whatever layout saved it.

    Every file is checked against its SHA-256 before anything is used of it. Only the files are read
    that hold some of what is wanted, and the indexes until all of it is found: where the layout is
    the one that saved it, rank 0's and this rank's own.

    Args:
        path: The checkpoint's folder, or its URL.
        wanted: For every parameter, the shard that this rank holds; its moments are read in the
            same shard. None reads whole tensors.
        kinds: The KEYs of the optimizer's tensors ``NAME/KEY`` that are read; None reads them all.
        world: Who reads, which says what index to look at first.

    Raises:
        CheckpointError: If it is missing, incomplete, damaged, foreign, of a newer format or,
            where shards are wanted, of another model.
        StorageError: If a file cannot be read now.
    """
    files, indexes = _opened(path, world)
    state = parse_json(_verified(path, _STATE, files), below(path, _STATE))
    targets: dict[tuple[str, str], _Target] = {}
    for index in indexes:
        if wanted is not None and not targets:
            _require_model(path, index.tensors[WEIGHTS], wanted)
        for section in SECTIONS:
            for name, saved in index.tensors[section].items():
                parameter, _, kind = name.rpartition("/")
                if section == WEIGHTS:
                    parameter = name
                elif kinds is not None and kind not in kinds:
                    continue
                if (target := targets.get((section, name))) is None:
                    shard = (wanted or {}).get(parameter)
                    target = targets[section, name] = _Target.of(saved, shard)
                target.plan(name, saved)
        files = files | index.files
        if not any(target.missing for target in targets.values()):
            break
    _read(path, files, targets)
    weights, optimizer = (
        {name: t.tensor for (of, name), t in targets.items() if of == section}
        for section in SECTIONS
    )
    return Checkpoint(weights, optimizer, state, dict(wanted or {}))


@dataclass(slots=True)
class _Target:
    """A tensor to be read, or a box of it; and which parts of which files go where in it."""

    box: Shard
    tensor: Tensor
    missing: int
    """Elements that are in no part so far."""
    reads: list[tuple[Part, tuple[slice, ...], tuple[slice, ...]]] = field(default_factory=list)

    @classmethod
    def of(cls, saved: Saved, shard: Shard | None) -> _Target:
        box = shard if shard and shard.shape == saved.shape else Shard.whole(saved.shape)
        return cls(box, torch.empty(0, dtype=saved.dtype), box.numel)

    def plan(self, name: str, saved: Saved) -> None:
        """Take what this box has in common with a rank's; torch's planner says what that is."""
        boxes = [_chunk(part.offset, part.size) for part in saved.parts]
        whole = TensorStorageMetadata(
            TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), boxes
        )
        own = [_chunk(self.box.offset, self.box.local)]
        for item in create_read_items_for_chunk_list(name, whole, own):
            number: Any = item.storage_index.index
            source, to = (
                tuple(slice(o, o + n) for o, n in zip(start, item.lengths, strict=True))
                for start in (item.storage_offsets, item.dest_offsets)
            )
            self.reads.append((saved.parts[number], source, to))
            self.missing -= math.prod(item.lengths)


def _chunk(offset: tuple[int, ...], size: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(size))


def _opened(path: Where, world: World) -> tuple[dict[str, str], Iterable[Index]]:
    """Read a manifest: the hashes in it, and the indexes, which are read as they are asked for."""
    where = below(path, MANIFEST)
    manifest = parse_json(storage.read(where), where)
    found, files = manifest.get("format"), manifest.get("files")
    if found == old_checkpoint.FORMAT:
        index = read_index(manifest, where)
        return index.files, [index]
    if found != FORMAT:
        raise CheckpointError(f"{where}: format {str(found)[:40]!r}, this halfstep reads {FORMAT}")
    if not isinstance(files, dict) or [*files] != _manifest_names(len(files) - 1):
        raise CheckpointError(f"{where}: damaged or foreign (its files are {files!r:.200})")
    return files, _indexes(path, files, world)


def _manifest_names(ranks: int) -> list[str]:
    return [_STATE, *map(_index_name, range(ranks))]


def _index_name(rank: int) -> str:
    return f"index-{rank + 1:05d}.json"


def _indexes(path: Where, files: Mapping[str, str], world: World) -> Iterator[Index]:
    """Yield what ranks wrote: first rank 0, which names every tensor, then from this rank's place.

    Layouts give neighbouring ranks neighbouring parts, so few are read before all is found.
    """
    count = len(files) - 1
    place = world.rank * count // world.size
    for rank in dict.fromkeys([0, *sorted(range(count), key=lambda rank: abs(rank - place))]):
        name = _index_name(rank)
        where = below(path, name)
        yield read_index(parse_json(_verified(path, name, files), where), where)


def _read(
    path: Where, files: Mapping[str, str], targets: Mapping[tuple[str, str], _Target]
) -> None:
    """Fill the targets, a file at a time."""
    of_file: dict[str, list[Any]] = {}
    for (_, name), target in targets.items():
        if target.missing:
            held, whole = target.box.numel - target.missing, target.box.numel
            raise CheckpointError(f"{path}: {name}: its shards hold {held} of {whole} elements")
        try:
            target.tensor = torch.empty(target.box.local, dtype=target.tensor.dtype)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: {name} of shape {target.box.local}: {error}") from error
        for part, source, to in target.reads:
            of_file.setdefault(part.file, []).append((name, part, source, target.tensor, to))
    for file, reads in of_file.items():
        try:
            tensors = load(_verified(path, file, files))
            for name, part, source, tensor, to in reads:
                found = tensors[name]
                if part.order is not None:
                    found = old_checkpoint.decoded(tensors, name, part.order)
                if (found.shape, found.dtype) != (part.size, tensor.dtype):
                    raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)} in the file")
                tensor[to].copy_(found[source])
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise _damaged(path, file, f"is not what its index says ({error!r:.200})") from error


def _verified(path: Where, name: str, files: Mapping[str, str]) -> bytes:
    """All of a file, if its SHA-256 is the one that it had."""
    content = storage.read(below(path, name))
    if sha256(content).hexdigest() != files.get(name):
        raise _damaged(path, name, "does not match its SHA-256")
    return content


def _damaged(path: Where, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{below(path, name)} {why}: the file is damaged. Use --resume last-good to go on from the "
        "checkpoint before it"
    )


def _require_model(path: Where, saved: Mapping[str, Saved], wanted: Mapping[str, Shard]) -> None:
    odd = sorted(set(saved) ^ set(wanted)) or [
        f"{name} is {entry.shape}, the model's {wanted[name].shape}"
        for name, entry in saved.items()
        if entry.shape != wanted[name].shape
    ]
    if odd:
        raise CheckpointError(f"{path}: made by another model: {', '.join(odd[:5])}")


# Writing.


def save_checkpoint(
    folder: Where,
    step: int,
    checkpoint: Checkpoint,
    keep: int,
    world: World = World(),  # noqa: B008  (frozen)
    spared: int | None = None,
) -> Any:
    """Write a checkpoint and remove old ones; all ranks call it together.

    Of the older ones, the newest ``keep`` stay, and that of the step ``spared``; none is removed
    before the new one is complete.

    Returns:
        Its path or URL.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf on any rank.
        StorageError: If storage still fails on any rank after a few tries. No incomplete
            checkpoint stays, and no other is removed.
        CheckpointError: The same, where trying again would not help.
    """
    final = checkpoint_path(folder, step)
    local = storage.is_local(folder)
    here = below(folder, f"{_TEMPORARY}step-{step:08d}") if local else final
    world.main_only(lambda: _begin(folder, here, final))
    reports = world.gather(_written(checkpoint, here, world))
    try:
        _require_good(reports, folder, final)
        state = json.dumps({"step": step, **checkpoint.state}, indent=1)
        world.main_only(lambda: _commit(state, reports, here, folder, final))
    except HalfstepError:
        if world.is_main:
            with suppress(OSError, CheckpointError):
                storage.remove(here)
        raise
    best = checkpoint_path(folder, step if spared is None else spared)
    world.main_only(lambda: _prune(folder, keep, {final, best}))
    return final


def _begin(folder: Where, here: Where, final: Where) -> None:
    """Make the folder to write into, and remove what killed saves left."""
    complete = [*map(str, list_checkpoints(folder))]
    for name in storage.names(folder):
        ours = not storage.is_local(folder) and _NAME.fullmatch(name)
        path = below(folder, name)
        if name.startswith(_TEMPORARY) or (ours and str(path) not in complete):
            with suppress(OSError, CheckpointError):  # what cannot be removed is no reason
                storage.remove(path)
    try:
        if str(final) in complete and here == final:
            raise FileExistsError("it exists already")
        storage.make(here)
    except (OSError, StorageError) as error:
        raise _unwritten(folder, final, error) from error


def _written(checkpoint: Checkpoint, here: Where, world: World) -> dict[str, Any]:
    """Write a rank's files; return a report on them, or on why they could not be written."""
    try:
        index = write_shards(checkpoint.written(world.rank), here, world.rank)
        text = json.dumps(index, separators=(",", ":")).encode()
        sha = storage.write(below(here, _index_name(world.rank)), [text])
    except NonFiniteError as error:
        return {"nonfinite": error.parameters}
    except (OSError, CheckpointError) as error:
        return {"error": str(error), "passing": isinstance(error, StorageError)}
    entries = [entry for section in SECTIONS for entry in index[section].values()]
    held = sum(Shard(e["shape"], *box).checksum for e in entries for _, *box in e["parts"])
    whole = sum(Shard.whole(e["shape"]).checksum for e in entries)
    return {"index": sha, "held": held, "whole": whole}


def _commit(
    state: str, reports: list[dict[str, Any]], here: Where, folder: Where, final: Where
) -> None:
    """Write the manifest, and give the folder its name."""
    if sum(report["held"] for report in reports) != reports[0]["whole"]:  # rank 0 has them all
        raise CheckpointError(
            f"{final}: the ranks' shards do not make up the tensors. Please report this"
        )
    try:
        hashes = [storage.write(below(here, _STATE), [state.encode()])]
        hashes += [report["index"] for report in reports]
        files = dict(zip(_manifest_names(len(reports)), hashes, strict=True))
        manifest = {"format": FORMAT, "files": files}
        storage.write(below(here, MANIFEST), [json.dumps(manifest, separators=(",", ":")).encode()])
        if here != final:
            storage.move(here, final)
    except (OSError, StorageError) as error:
        raise _unwritten(folder, final, error) from error


def _require_good(reports: list[dict[str, Any]], folder: Where, final: Where) -> None:
    """Raise the error in one of the reports, if there is one."""
    broken = tuple(dict.fromkeys(n for r in reports for n in r.get("nonfinite", ())))
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
            kind = StorageError if report["passing"] else CheckpointError
            raise _unwritten(folder, final, kind(f"{whose}{report['error']}"))


def _unwritten(folder: Where, final: Where, why: Exception) -> CheckpointError:
    kept = list_checkpoints(folder)
    last = f"the last checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier one"
    kind = StorageError if isinstance(why, StorageError) else CheckpointError
    return kind(
        f"checkpoint {final} cannot be written: {why}; {last}. Free space or move the run's folder "
        "to another disk, then go on with --resume"
    )


def _prune(folder: Where, keep: int, spared: Collection[Any]) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        if old in spared:
            continue
        try:  # first what makes it one, so that a kill leaves no half of one
            if storage.is_local(old):
                old, whole = below(folder, f"{_TEMPORARY}{Path(old).name}"), old
                storage.move(whole, old)
            else:
                storage.remove(below(old, MANIFEST))
            storage.remove(old)
        except OSError as error:
            raise CheckpointError(f"old checkpoint {old} cannot be removed: {error}") from error
