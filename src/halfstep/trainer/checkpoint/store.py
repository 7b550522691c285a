"""Checkpoints that are whole or not there, and that say so when a bit has flipped.

A checkpoint is a folder ``step-00000020``::

    weights.safetensors    what the optimizer updates: parameters, or fp32 masters
    optimizer.safetensors  "NAME/exp_avg" ...
    state.json             step, tokens, precision state, configuration, tokenizer fingerprint
    manifest.json          SHA-256 of each of the above, and the index of tensors

Of N ranks that hold pieces of the tensors each writes ``weights-00001-of-0000N.safetensors`` and
the same of the optimizer, as far as it has something to write. The index
(``index.py``) says which file has which box of which tensor, so that any number
of ranks, or one process, reads just what it needs, whatever the layout.

N ranks make one checkpoint without a collective, so that a save can run in a thread beside
training, whose collectives it must not mix with. Every rank writes its files into
``.unfinished-step-00000100-TOKEN`` and then its receipt there, by rename. Rank 0 waits for all
receipts, sees that the pieces make up every tensor, writes the manifest, syncs what it wrote, and
renames the folder: ``step-00000100`` is there whole or not at all.

No file format sees a flipped bit by itself, so loading checks every file that it reads against the
manifest before anything is changed. Nothing is ever unpickled; ``torch.distributed.checkpoint`` is
not used because it reads its ``.metadata`` with a raw unpickler, which runs what the file says
(measured with torch 2.13).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError
from halfstep.files import sync, sync_folder
from halfstep.optim.storage.state import TOPS, tops_of
from halfstep.trainer.checkpoint.index import (
    FORMAT,
    MANIFEST,
    OPTIMIZER,
    SECTIONS,
    STATE,
    WEIGHTS,
    Entry,
    Index,
    check_index,
    read_json,
)
from halfstep.trainer.checkpoint.pieces import Piece
from halfstep.trainer.checkpoint.shards import Own, Part, Reader, first_format_index, require_sha256

TIMEOUT = 600.0  # seconds: a rank may be slower by as much as a large file takes on a shared disk
_TEMPORARY = ".unfinished-"  # being written or being removed
_NAME = re.compile(r"step-(\d{8,})")
_TOKEN = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\.(\d{1,9}))?")
_LEFTOVER = re.compile(rf"{re.escape(_TEMPORARY)}step-\d{{8,}}-{_TOKEN.pattern}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a checkpoint holds, or this rank's pieces of it.

    Attributes:
        weights: Parameter name to tensor.
        optimizer: ``"NAME/KEY"`` to tensor; of format 1 also random states under ``"rng/"``.
        state: Plain JSON values; of several ranks that save, rank 0's are written. A save adds
            ``"step"`` where it is not there.
        pieces: Parameter name to the piece that the tensors are. A parameter's moments are the same
            piece as it is, its step counter is whole. A tensor that is not in here is whole, and
            rank 0 writes it.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    pieces: Mapping[str, Piece] = field(default_factory=dict)

    def part(self, rank: int, step: int) -> Part:
        """What a rank writes of it as this step; shares memory with the tensors.

        Raises:
            CheckpointError: If a tensor does not have its piece's shape, or a dtype that no file
                has, or the state says that it is of another step.
        """
        state = {"step": step, **self.state}
        if state["step"] != step:
            found = str(state["step"])[:40]
            raise CheckpointError(f"a state of step {found} cannot be saved as that of step {step}")
        owned: dict[str, list[Own]] = {WEIGHTS: [], OPTIMIZER: []}
        for name, tensor in self.weights.items():
            piece = self.pieces.get(name) or Piece.whole(tensor.shape, written=rank == 0)
            if piece.written:
                owned[WEIGHTS].append(Own(name, tensor, piece))
        for key, tensor in self.optimizer.items():
            base = key.removesuffix(TOPS)
            if base != key and base in self.optimizer and self.optimizer[base].dtype == torch.uint8:
                continue  # goes with its codes
            piece = self._moments_piece(key, tensor, rank)
            if piece.written:
                tops = self.optimizer.get(tops_of(key)) if tensor.dtype == torch.uint8 else None
                owned[OPTIMIZER].append(Own(key, tensor, piece, tops))
        return Part(owned, json.dumps(state, indent=1))

    def _moments_piece(self, key: str, tensor: Tensor, rank: int) -> Piece:
        piece = self.pieces.get(key.rpartition("/")[0])
        if piece is None or tensor.dim() == 0:
            return Piece.whole(tensor.shape, written=rank == 0)
        if tuple(tensor.shape) != piece.local == piece.shape:
            return Piece.whole(tensor.shape, written=piece.written)
        return piece


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that write a checkpoint together.

    Attributes:
        rank: This process's.
        size: How many there are.
        token: Of letters, digits, ``-`` and ``_``, perhaps with ``.NUMBER`` behind it. The same on
            all ranks, and another one in every attempt to save: a restarted run, or a step saved
            again after an error. Within a run, later saves have higher numbers. One process needs
            none.
        timeout: Seconds that rank 0 waits for the others' receipts.
    """

    rank: int = 0
    size: int = 1
    token: str = ""
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size):
            raise CheckpointError(f"rank {self.rank} of {self.size} ranks cannot save")
        if not _TOKEN.fullmatch(self.token) and (self.size > 1 or self.token):
            raise CheckpointError(
                f"a save by {self.size} ranks has the token {self.token!r}; allowed: 1 to 64 "
                "letters, digits, - and _, then perhaps . and a number, the same on every rank"
            )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where a step's checkpoint is, if there is one."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run's ``checkpoints`` folder, oldest first.

    A folder without a manifest is none: a save gives its folder the name with the manifest in it.
    """
    return [path for path in _named(folder) if os.path.lexists(path / MANIFEST)]


def passed_over(folder: Path) -> list[Path]:
    """What has a checkpoint's name, and a later one than all checkpoints, but is none."""
    found, good = _named(folder), list_checkpoints(folder)
    return found[found.index(good[-1]) + 1 :] if good else found


def _named(folder: Path) -> list[Path]:
    """All with a checkpoint's name, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def save_part(
    folder: Path,
    step: int,
    part: Part,
    keep: int,
    team: Team = Team(),
    spared: int | None = None,
) -> Path:
    """Write this rank's part of a checkpoint; on rank 0, complete it and remove old ones.

    Args:
        folder: The run's ``checkpoints`` folder, which all ranks share; made if absent.
        step: Optimizer steps taken.
        part: What this rank writes; every weight and moment must be finite.
        keep: How many to keep, at least 1; none is removed before the new one is safely there.
        team: The ranks that each call this for the step. They need not do so at the same time:
            there is no collective; rank 0 waits for the others' receipts.
        spared: A step whose checkpoint stays, whatever its age.

    Returns:
        The checkpoint's folder; the same checkpoint, if it is there, stays as it is. On rank 0 it
        is complete; on the others it will be, unless rank 0 raises.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf, on the rank that has it and on rank 0;
            nothing stays written and nothing is removed, so the last finite checkpoint stays.
        CheckpointError: If this rank's files cannot be written (full disk, no permission); on rank
            0, if any rank's cannot, a receipt is missing, the pieces do not make up a tensor, or
            there is something else under the checkpoint's name. Nothing half-made stays, and
            nothing is removed.
    """
    final = checkpoint_path(folder, step)
    temporary = folder / f"{_TEMPORARY}{final.name}{f'-{team.token}' if team.token else ''}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if team.rank == 0:
            _remove_leftovers(folder, team)
        temporary.mkdir(exist_ok=team.size > 1)
        report = _written(part, temporary, team)
        if team.rank:
            _hand_in(temporary, team.rank, report)
            _require_good([report], final)
            return final
        try:
            reports = [report, *_receipts(temporary, final, team)]
        except CheckpointError:
            _require_good([report], final)  # what is wrong here tells more than a missing receipt
            raise
        _require_good(reports, final)
        _commit(temporary, final, reports)
    except (OSError, SafetensorError, HalfstepError) as error:
        if team.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, HalfstepError):
            raise
        raise _unwritten(final, str(error)) from error
    _prune(folder, keep, {final, checkpoint_path(folder, step if spared is None else spared)})
    return final


def _written(part: Part, temporary: Path, team: Team) -> dict[str, Any]:
    """A rank's report of the files that it has written, or of why it has not."""
    if broken := part.first_nonfinite():
        return {"nonfinite": broken}
    try:
        return part.write(temporary, team.rank, team.size)
    except (OSError, SafetensorError) as error:
        return {"error": str(error)}


def _hand_in(temporary: Path, rank: int, report: dict[str, Any]) -> None:
    """Give rank 0 a receipt: of an error too, so that it need not wait."""
    if "error" not in report:
        _write_receipt(temporary, rank, report)
        return
    for path in temporary.glob(f"*-{rank + 1:05d}-of-*"):  # makes room
        path.unlink(missing_ok=True)
    with suppress(OSError):  # rank 0 then names the missing receipt
        _write_receipt(temporary, rank, report)


def _commit(temporary: Path, final: Path, reports: list[dict[str, Any]]) -> None:
    manifest = _merged(reports, final)
    check_index(manifest, final / MANIFEST)
    missing = [name for name in manifest["files"] if not (temporary / name).is_file()]
    if missing:
        raise _unwritten(
            final,
            f"rank 0 does not see {', '.join(missing[:5])} of other ranks",
            "See that all ranks share the run's folder",
        )
    (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for rank in range(1, len(reports)):
        (temporary / _receipt(rank)).unlink()
    if os.path.lexists(final):
        _require_same(final, manifest)
        shutil.rmtree(temporary)
        return
    sync_folder(temporary)
    os.rename(temporary, final)
    sync(final.parent)


def _require_same(final: Path, manifest: dict[str, Any]) -> None:
    """Refuse what lies under a checkpoint's name, unless it is that checkpoint, file for file."""
    with suppress(CheckpointError):
        there = read_json(final / MANIFEST)
        if there == manifest and all((final / name).is_file() for name in manifest["files"]):
            return
    raise _unwritten(
        final,
        "something else is there under its name",
        f"Look at {final} and move it away or remove it",
    )


def _merged(reports: list[dict[str, Any]], final: Path) -> dict[str, Any]:
    """One manifest of all ranks' reports."""
    manifest: dict[str, Any] = {"format": FORMAT, "files": {}, **{s: {} for s in SECTIONS}}
    for rank, report in enumerate(reports):
        manifest["files"] |= report["files"]
        for section in SECTIONS:
            for name, entry in report[section].items():
                whole = manifest[section].setdefault(name, {**entry, "pieces": []})
                if any(whole[key] != entry[key] for key in ("shape", "dtype")):
                    raise _unwritten(
                        final,
                        f"{name} is {entry['dtype']} of shape {entry['shape']} on rank {rank}, "
                        f"{whole['dtype']} of shape {whole['shape']} on a rank before it",
                        "Give every rank the same model and precision",
                    )
                whole["pieces"] += entry["pieces"]
    return manifest


def _receipt(rank: int) -> str:
    return f"receipt-{rank + 1:05d}.json"


def _write_receipt(folder: Path, rank: int, report: dict[str, Any]) -> None:
    path = folder / _receipt(rank)
    unnamed = path.with_suffix(".writing")
    unnamed.write_text(json.dumps(report), encoding="utf-8")
    os.rename(unnamed, path)


def _receipts(folder: Path, final: Path, team: Team) -> list[dict[str, Any]]:
    """What ranks 1, 2, ... wrote."""
    found: dict[int, dict[str, Any]] = {}
    begin, pause = time.monotonic(), 0.002
    while True:
        for rank in range(1, team.size):
            if rank not in found and (folder / _receipt(rank)).exists():
                found[rank] = read_json(folder / _receipt(rank))
        missing = [rank for rank in range(1, team.size) if rank not in found]
        if not missing:
            return [found[rank] for rank in sorted(found)]
        if time.monotonic() - begin > team.timeout:
            listed = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
            raise _unwritten(
                final,
                f"no receipt of rank{'s'[: len(missing) > 1]} {listed} after {team.timeout:g} s",
                "Look for what stopped them, and see that all ranks share the run's folder",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _require_good(reports: list[dict[str, Any]], final: Path) -> None:
    """Refuse to go on from what a rank, or the only one of the list, could not write."""
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


def _unwritten(
    final: Path,
    why: str,
    advice: str = "Free space or move the run's folder to another disk",
) -> CheckpointError:
    kept = list_checkpoints(final.parent)
    last = f"the last checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier one"
    return CheckpointError(
        f"checkpoint {final} cannot be written: {why}; {last}. {advice}, then go on with --resume"
    )


def _remove_leftovers(folder: Path, team: Team) -> None:
    """Remove what killed attempts left, not what other ranks already write of this or a later one.

    What cannot be removed is left: it is no reason to have no checkpoint.
    """
    own = _TOKEN.fullmatch(team.token)
    for path in folder.glob(f"{_TEMPORARY}*"):
        other = _LEFTOVER.fullmatch(path.name)
        ahead = (
            (own and other and team.size > 1)
            and own[1] == other[1]
            and int(other[2] or 0) >= int(own[2] or 0)
        )
        if not ahead:
            shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path, keep: int, spared: Collection[Path]) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        if old in spared:
            continue
        try:  # renamed first: a kill leaves no half of one
            shutil.rmtree(old.rename(folder / f"{_TEMPORARY}{old.name}"))
        except OSError as error:
            raise CheckpointError(f"old checkpoint {old} cannot be removed: {error}") from error


def load_checkpoint(path: Path, wanted: Mapping[str, Piece] | None = None) -> Checkpoint:
    """Read a checkpoint, or a rank's pieces of it, whatever layout saved it.

    Args:
        path: Its folder.
        wanted: The piece of every parameter that this rank holds; the moments come in the same
            piece. None reads whole tensors.

    Returns:
        Tensors in memory of their own. A moment in 8-bit codes comes with its block tops where the
        piece is one that a rank saved, bit for bit; otherwise decoded to fp32, which
        :func:`convert_optimizer_tensors` brings into the run's format.

    Raises:
        CheckpointError: If it is missing, incomplete, damaged, foreign, of a newer format, of
            another step than its folder's name says or, where pieces are wanted, of another model;
            the message names the file and the tensor.

    Every file is checked against its SHA-256 before something is read from it; with ``wanted``,
    only the files that hold something of it, so that N ranks need not each read everything.
    """
    index = _index(path)
    require_sha256(path / STATE, index.files[STATE])
    state = read_json(path / STATE)
    _require_step(path, state)
    if wanted is not None:
        _require_model(path, index.tensors[WEIGHTS], wanted)
    found: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    with ExitStack() as stack:
        reader = Reader(path, index, stack)
        for name in index.files if wanted is None else ():
            if name != STATE:
                reader.open(name)
        for section, tensors in found.items():
            for name, entry in index.tensors[section].items():
                piece = _wanted(path, section, name, entry, wanted or {})
                tensors |= reader.tensor(section, name, piece)
    return Checkpoint(found[WEIGHTS], found[OPTIMIZER], state, dict(wanted or {}))


def _require_step(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint under another step's name: what comes after it would be miscounted.

    A folder that has no step in its name may hold any.
    """
    named = _NAME.fullmatch(path.name)
    if named and state.get("step") != int(named[1]):
        raise CheckpointError(
            f"{path} holds step {state.get('step')!r:.40}: it was renamed or copied. Remove it to "
            "go on from the checkpoint before it, or give it its own name back"
        )


def _index(path: Path) -> Index:
    manifest = path / MANIFEST
    raw = read_json(manifest)
    if raw.get("format") == FORMAT:
        return check_index(raw, manifest)
    if raw.get("format") == 1:
        return first_format_index(raw, manifest)
    raise CheckpointError(
        f"{manifest}: format {str(raw.get('format'))[:40]!r}, this halfstep reads 1 to {FORMAT}"
    )


def _require_model(path: Path, saved: Mapping[str, Entry], wanted: Mapping[str, Piece]) -> None:
    odd = sorted(set(saved) ^ set(wanted)) or [
        f"{name} is {entry.shape}, the model's {wanted[name].shape}"
        for name, entry in saved.items()
        if entry.shape != wanted[name].shape
    ]
    if odd:
        raise CheckpointError(f"{path}: made by another model: {', '.join(odd[:5])}")


def _wanted(
    path: Path, section: str, name: str, entry: Entry, wanted: Mapping[str, Piece]
) -> Piece | None:
    """The piece of a tensor that belongs to the wanted piece of its parameter; None is all."""
    piece = wanted.get(name if section == WEIGHTS else name.rpartition("/")[0])
    if piece is None or not entry.shape or piece.local == piece.shape:
        return None
    if entry.shape != piece.shape:
        raise CheckpointError(
            f"{path}: {name} has shape {entry.shape}, its parameter {piece.shape}: it cannot be "
            f"cut into pieces as the parameter is; resume on ranks that hold the parameter whole"
        )
    return piece
