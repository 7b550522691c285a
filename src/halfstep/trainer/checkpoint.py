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

``torch.distributed.checkpoint``'s ``HuggingFaceStorageReader`` reads the folder. But it checks no
hash, reads the header of every file on every rank, and leaves zeros where a file is missing, so
that reading is ours: no file is used before its SHA-256 was compared. Its own format is not used
because its ``.metadata`` is read with an unrestricted unpickler, which runs code from the file
(observed with torch 2.13).
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, NonFiniteError, StorageError
from halfstep.files import (
    MANIFEST,
    Where,
    begin_each,
    below,
    each_of,
    is_local,
    make_lasting,
    move,
    names_in,
    parse_json,
    read_json,
    read_whole,
    remove,
    write_hashed,
)
from halfstep.trainer.shards import (
    OLD_FORMAT,
    OPTIMIZER,
    WEIGHTS,
    LocalShard,
    Shard,
    Stored,
    read_index,
    write_shards,
)

T = TypeVar("T")
FORMAT = 3
CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
_STATE = "state.json"
_TEMPORARY = ".unfinished-"  # prefix of folders that are being written or removed
_DAMAGED = "damaged-"
_LAST_WORD = timedelta(seconds=10)  # that ranks wait for one another after an error
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


def folders_of(run: Any, path: Path) -> list[Any]:
    """Where a run's checkpoints are: in the first folder, and in a second while that fails."""
    return [run.checkpoint_dir or path / CHECKPOINTS, *filter(None, [run.second_dir])]


def list_checkpoints(*folders: Where) -> list[Any]:
    """List the complete checkpoints of a run's folders, oldest first.

    A folder without a manifest does not count: it is what comes last of a save. Of two with the
    same step, that of the first folder is the later.
    """
    found, lost = reached(folders)
    if lost:
        raise lost
    return found


def reached(folders: Iterable[Where]) -> tuple[list[Any], CheckpointError | None]:
    """The checkpoints of all folders that can be reached, and why another one cannot be."""
    found, lost = list[tuple[int, int, Any]](), None
    for number, folder in enumerate(folders):
        try:
            found += [
                (int(m[1]), -number, path)
                for name in names_in(folder)
                if (m := _NAME.fullmatch(name))
                and MANIFEST in names_in(path := below(folder, name))
            ]
        except CheckpointError as error:
            lost = lost or error
    return [path for *_, path in sorted(found)], lost


def set_aside(path: Where) -> None:
    """Rename a damaged checkpoint, so that another of its step can be written."""
    parent, _, name = str(path).rpartition("/")
    aside = below(parent, _DAMAGED + name)
    if names_in(aside):
        remove(aside)
    move(path, aside)


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
    state_sha, indexes = _opened(path, world)
    state = parse_json(_verified(below(path, _STATE), state_sha), below(path, _STATE))
    files: dict[str, str] = {}
    targets: dict[tuple[str, str], _Target] = {}
    for hashes, stored in indexes:
        if wanted is not None and not targets:
            _require_model(path, stored, wanted)
        files |= hashes
        _plan(targets, stored, wanted or {}, kinds)
        if not any(target.missing for target in targets.values()):
            break
    _read(path, files, targets)
    tensors: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for (section, name), target in targets.items():
        tensors[section][name] = target.tensor
    return Checkpoint(tensors[WEIGHTS], tensors[OPTIMIZER], state, dict(wanted or {}))


def _plan(
    targets: dict[tuple[str, str], _Target],
    stored: Iterable[Stored],
    wanted: Mapping[str, Shard],
    kinds: Collection[str] | None,
) -> None:
    """Take what is wanted of one rank's boxes; new names are new targets."""
    for each in stored:
        parameter, _, kind = each.name.rpartition("/")
        if each.section == WEIGHTS:
            parameter = each.name
        elif kinds is not None and kind not in kinds:
            continue
        key = each.section, each.name
        if key not in targets:
            targets[key] = _Target.of(each, wanted.get(parameter))
        targets[key].plan(each)


@dataclass(slots=True)
class _Target:
    """A tensor to be read, or a box of it; and what is read of which file."""

    box: Shard
    tensor: Any
    missing: int
    """Elements that are in no file so far."""
    reads: list[tuple[Stored, list[range]]] = field(default_factory=list)

    @classmethod
    def of(cls, stored: Stored, shard: Shard | None) -> _Target:
        shape = stored.box.shape
        box = shard if shard and shard.shape == shape else Shard.whole(shape)
        nothing = None if box.numel else torch.empty(box.local, dtype=stored.dtype)
        return cls(box, nothing, box.numel)

    def plan(self, stored: Stored) -> None:
        """Take what this box has in common with a stored one: the indices along each dim."""
        boxes = (self.box, stored.box)
        starts = map(max, *(box.offset for box in boxes))
        ends = map(min, *(map(operator.add, box.offset, box.local) for box in boxes))
        common = [*map(range, starts, ends)]
        if all(common):
            self.reads.append((stored, common))
            self.missing -= math.prod(map(len, common))


def _opened(path: Where, world: World) -> tuple[Any, Iterable[tuple[dict[str, str], list[Stored]]]]:
    """Return a manifest's hash of the state, and the indexes, which are read as they are needed.

    The first is that of rank 0, which names every tensor; then they follow from this rank's place
    on, as layouts give neighbouring ranks neighbouring parts.
    """
    where = below(path, MANIFEST)
    manifest = read_json(where)
    found, hashes = manifest.get("format"), manifest.get("indexes")
    if found == OLD_FORMAT:
        index = read_index(manifest, where)
        return index[0].get(_STATE), [index]
    if found != FORMAT or not (isinstance(hashes, list) and hashes):
        raise CheckpointError(
            f"{where}: of format {str(found)[:40]!r}, damaged or foreign; this halfstep reads "
            f"{FORMAT}"
        )
    place = world.rank * len(hashes) // world.size
    nearest = sorted(range(len(hashes)), key=lambda rank: abs(rank - place))

    def index_of(rank: int) -> tuple[dict[str, str], list[Stored]]:
        where = below(path, _index_name(rank))
        return read_index(parse_json(_verified(where, hashes[rank]), where), where)

    return manifest.get("state"), map(index_of, dict.fromkeys([0, *nearest]))


def _index_name(rank: int) -> str:
    return f"index-{rank + 1:05d}.json"


def _read(
    path: Where, files: Mapping[str, str], targets: Mapping[tuple[str, str], _Target]
) -> None:
    """Fill the targets, a few files at a time."""
    reads: dict[str, list[tuple[_Target, Stored, list[range]]]] = {}
    for (_, name), target in targets.items():
        if target.missing:
            held, whole = target.box.numel - target.missing, target.box.numel
            raise CheckpointError(f"{path}: {name}: its shards hold {held} of {whole} elements")
        for stored, common in target.reads:
            reads.setdefault(stored.file, []).append((target, stored, common))
    making = Lock()

    def fill(file: str) -> None:
        content = _verified(below(path, file), files.get(file))
        try:
            tensors = load(content)
            for target, stored, common in reads[file]:
                values = stored.values(tensors)
                with making:
                    if target.tensor is None:
                        target.tensor = torch.empty(target.box.local, dtype=values.dtype)
                to, source = (
                    tuple(
                        slice(r.start - o, r.stop - o)
                        for r, o in zip(common, box.offset, strict=True)
                    )
                    for box in (target.box, stored.box)
                )
                target.tensor[to].copy_(values[source])
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise _damaged(
                below(path, file), f"is not what its index says ({error!r:.200})"
            ) from error

    each_of(fill, reads)


def _verified(where: Where, sha: str | None) -> bytes:
    """All of a file, if its SHA-256 is the one that it had."""
    content = read_whole(where)
    if sha256(content).hexdigest() != sha:
        raise _damaged(where, "does not match its SHA-256")
    return content


def _damaged(where: Where, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} {why}: the file is damaged. Rename {Path(where).parent.name}, and the checkpoint "
        "before it is used; a training that goes on does so by --resume last-good"
    )


def _require_model(path: Where, stored: Iterable[Stored], wanted: Mapping[str, Shard]) -> None:
    saved = {each.name: each.box.shape for each in stored if each.section == WEIGHTS}
    odd = sorted(set(saved) ^ set(wanted)) or [
        f"{name} is {shape}, the model's {wanted[name].shape}"
        for name, shape in saved.items()
        if shape != wanted[name].shape
    ]
    if odd:
        raise CheckpointError(f"{path}: made by another model: {', '.join(odd[:5])}")


# Writing.


def require_writable(folder: Where, *others: Where) -> None:
    """Refuse folders of which none can ever take checkpoints, before a step is lost to them."""
    probe = below(folder, f"{_TEMPORARY}probe")
    try:
        write_hashed(probe, b"probe")
    except StorageError:  # a full disk, say: what may pass is for the run's own deadline
        return
    except CheckpointError as error:
        if not others:
            raise type(error)(
                f"{folder} cannot take checkpoints: {error}; choose another"
            ) from error
        require_writable(*others)
    with suppress(CheckpointError):  # the first save removes it
        remove(probe)


class Save(NamedTuple):
    """A checkpoint whose files are written, but maybe not to the disk: its tensors may change.

    Other threads wait for the disk; the one that trains does all else, and alone talks to ranks.
    """

    final: Any
    """Its path or URL, once it is complete."""
    lasting: list[Future[object]]
    """Those of this rank's files, which are done when the disk has them."""
    complete: Callable[[], Any]
    """Wait for the disk, name it, and remove old ones, as :func:`save_checkpoint` says."""
    alone: Callable[[], Any]
    """The same at a run's end, where ranks may be gone: if all say in time that they have theirs.

    They say it in the group's store, as one that is gone would break any collective.
    """


def save_checkpoint(
    folder: Where,
    step: int,
    checkpoint: Checkpoint,
    keep: int,
    world: World = World(),  # noqa: B008  (frozen)
    spared: int | None = None,
    *,
    waits: bool = True,
) -> Any:
    """Write a checkpoint and remove old ones; all ranks call it together.

    Of the older ones, the newest ``keep`` stay, and that of the step ``spared``; none is removed
    before the new one is complete.

    Returns:
        Its path or URL; where it ``waits`` for no disk, a :class:`Save`.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf on any rank.
        StorageError: If storage still fails on any rank after a few tries. No incomplete
            checkpoint stays, and no other is removed.
        CheckpointError: The same, where trying again would not help.
    """
    final = checkpoint_path(folder, step)
    local = is_local(folder)
    here = below(folder, f"{_TEMPORARY}step-{step:08d}") if local else final
    best = checkpoint_path(folder, step if spared is None else spared)
    state = json.dumps({"step": step, **checkpoint.state}, indent=1)
    files: dict[Any, str] = {}
    with _all_or_nothing(world, folder, here, final):
        _on_main(world, lambda: _begin(folder, here, final))
        reports = _on_all(world, lambda: _written(checkpoint, here, world, files))
    lasting, finish = begin_each(lambda each: make_lasting(*each), files.items())

    def complete(world: World = world) -> Any:
        with _all_or_nothing(world, folder, here, final):
            _on_all(world, finish)
            _on_main(world, lambda: _commit(state, reports, here, final))
        with suppress(CheckpointError):  # what cannot be removed now goes with the next save
            _on_main(world, lambda: _prune(folder, keep, {final, best}))
        return final

    def alone() -> None:
        _hear_all(world, final, finish)
        if world.is_main:
            complete(World())

    return complete() if waits else Save(final, lasting, complete, alone)


def _hear_all(world: World, what: Where, finish: Callable[[], None]) -> None:
    """Finish this rank's part, say so in the group's store, and wait until all ranks do."""
    if world.size > 1:
        finish()
        store, keys = _get_default_store(), [f"{what}/{rank}" for rank in range(world.size)]
        store.set(keys[world.rank], "")
        store.wait(keys, _LAST_WORD)


@contextmanager
def _all_or_nothing(world: World, folder: Where, here: Where, final: Where) -> Iterator[None]:
    """Remove what was written of a checkpoint that fails."""
    try:
        yield
    except (NonFiniteError, CheckpointError) as error:
        last = _on_all(world, lambda: _left(folder, here) if world.is_main else "")[0]
        if isinstance(error, NonFiniteError):
            raise
        raise type(error)(f"checkpoint {final} cannot be written: {error}; {last}") from error


def _on_main(world: World, work: Callable[[], object]) -> None:
    _on_all(world, lambda: work() if world.is_main else None)


def _on_all(world: World, work: Callable[[], T]) -> list[T]:
    """Do work on every rank; return what it gave, or raise on all of them what one raised."""

    def caught() -> Any:
        try:
            return work()
        except (NonFiniteError, CheckpointError) as error:
            return error

    reports = world.gather(caught)
    _require_good(reports)
    return reports


def _begin(folder: Where, here: Where, final: Where) -> None:
    """Remove what killed saves left."""
    complete = list_checkpoints(folder)
    for name in names_in(folder):
        path = below(folder, name)
        in_store = not is_local(folder) and _NAME.fullmatch(name) and path not in complete
        if in_store or name.startswith(_TEMPORARY):
            with suppress(CheckpointError):  # what cannot be removed is no reason not to save
                remove(path)
    if here == final and final in complete:
        raise CheckpointError(f"{final} exists already")


def _written(
    checkpoint: Checkpoint, here: Where, world: World, files: dict[Any, str]
) -> dict[str, Any]:
    """Write a rank's files, whose SHA-256 ``files`` takes; return a report on them."""
    index = write_shards(checkpoint.written(world.rank), here, world.rank)
    text, where = json.dumps(index, separators=(",", ":")).encode(), _index_name(world.rank)
    sha = write_hashed(below(here, where), text, lasting=False)
    hashes = {file: entry["sha256"] for file, entry in index.items()} | {where: sha}
    files |= {below(here, file): each for file, each in hashes.items()}
    _, stored = read_index(json.loads(text), here)
    held = sum(each.box.checksum for each in stored)
    shapes = {each.name: each.box.shape for each in stored}
    whole = sum(Shard.whole(shape).checksum for shape in shapes.values())
    return {"index": sha, "held": held, "whole": whole}


def _require_good(reports: list[Any]) -> None:
    """Raise the error among the reports, if there is one, with the rank's number."""
    broken = [name for r in reports if isinstance(r, NonFiniteError) for name in r.parameters]
    if broken:
        raise NonFiniteError(
            f"{broken[0]} is not finite: no checkpoint is written from it, and the last one stays "
            "as it is",
            cause="weights",
            parameters=tuple(dict.fromkeys(broken)),
        )
    for rank, report in enumerate(reports):
        if isinstance(report, CheckpointError):
            raise type(report)(f"rank {rank}: {report}" if len(reports) > 1 else f"{report}")


def _commit(state: str, reports: list[dict[str, Any]], here: Where, final: Where) -> None:
    """Write the manifest, and give the folder its name."""
    if sum(report["held"] for report in reports) != reports[0]["whole"]:  # rank 0 names them all
        raise CheckpointError("the ranks' shards do not make up the tensors")
    sha = write_hashed(below(here, _STATE), state.encode())
    indexes = [report["index"] for report in reports]
    manifest = {"format": FORMAT, "state": sha, "indexes": indexes}
    write_hashed(below(here, MANIFEST), json.dumps(manifest, separators=(",", ":")).encode())
    if here != final:
        move(here, final)


def _left(folder: Where, here: Where) -> str:
    """Remove what was written of a checkpoint that failed; say what there is instead."""
    kept = []
    with suppress(CheckpointError):
        kept = list_checkpoints(folder)
        if here not in kept:
            remove(here)
    return f"its last one, {kept[-1]}, is intact" if kept else "there is no earlier one in it"


def _prune(folder: Where, keep: int, spared: Collection[Any]) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        if old in spared:
            continue
        if is_local(old):  # first what makes it one, so that a kill leaves no half of one
            whole, old = old, below(folder, f"{_TEMPORARY}{Path(old).name}")
            move(whole, old)
        else:
            remove(below(old, MANIFEST))
        remove(old)
