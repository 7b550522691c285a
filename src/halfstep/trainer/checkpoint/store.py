"""Writes checkpoints atomically, and refuses on loading any in which a bit has flipped.

A checkpoint is a folder ``step-00000020``::

    weights.safetensors    what the optimizer updates: parameters, or fp32 masters
    optimizer.safetensors  "NAME/exp_avg" ...
    state.json             step, tokens, precision state, configuration, tokenizer fingerprint
    manifest.json          SHA-256 of each of the above, and the index of tensors

If N ranks hold pieces of the tensors, each writes ``weights-00001-of-0000N.safetensors``, and the
same for the optimizer, if it has anything to write. The index (``index.py``) says which file has
which box of which tensor, so that any number of ranks, or one process, reads just what it needs,
whatever the layout.

N ranks make one checkpoint without a collective, so that a save can run in a thread beside
training, whose collectives it must not mix with. Every rank writes its files into
``.unfinished-step-00000100-TOKEN`` and then its receipt there, by rename. Rank 0 waits for all
receipts, checks that the pieces make up every tensor, writes the manifest, syncs what it wrote, and
renames the folder: ``step-00000100`` exists completely or not at all.

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
from halfstep.files import read_json, require_sha256, sync, sync_folder
from halfstep.optim.state import TOPS, tops_of
from halfstep.trainer.checkpoint.index import (
    FORMAT,
    MANIFEST,
    OPTIMIZER,
    SECTIONS,
    STATE,
    WEIGHTS,
    Entry,
    Index,
    Piece,
    check_index,
)
from halfstep.trainer.checkpoint.shards import Own, Part, Reader

TIMEOUT = 600.0  # seconds; ranks may differ by the time that a large file takes on a shared disk
_TEMPORARY = ".unfinished-"  # prefix of folders that are being written or removed
_NAME = re.compile(r"step-(\d{8,})")
_TOKEN = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\.(\d{1,9}))?")
_LEFTOVER = re.compile(rf"{re.escape(_TEMPORARY)}step-\d{{8,}}-{_TOKEN.pattern}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint in memory, or this rank's pieces of them.

    Attributes:
        weights: Parameter name to tensor.
        optimizer: ``"NAME/KEY"`` to tensor.
        state: Plain JSON values; where several ranks save, rank 0's are written. A save adds
            ``"step"`` if it is missing.
        pieces: Parameter name to the piece that its tensors hold. A parameter's moments hold the
            same piece, its step counter is whole. A tensor without an entry is whole, and rank 0
            writes it.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    pieces: Mapping[str, Piece] = field(default_factory=dict)

    def part(self, rank: int, step: int) -> Part:
        """Collect what a rank writes for this step; it shares memory with the tensors.

        Raises:
            CheckpointError: If a tensor does not have its piece's shape, or has a dtype that files
                do not support, or if the state belongs to another step.
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
                continue  # block tops are written along with their codes
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
        rank: This process's rank.
        size: Number of processes.
        token: Letters, digits, ``-`` and ``_``, perhaps followed by ``.NUMBER``. It is the same on
            all ranks, but differs between attempts to save, as after a restart or when a step is
            saved again after an error. Within a run, later saves have higher numbers. One process
            needs no token.
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
    """Return the path that a step's checkpoint has, whether or not it exists."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run's ``checkpoints`` folder, oldest first.

    A folder without a manifest does not count: a save renames its folder with the manifest in it.
    """
    return [path for path in _named(folder) if os.path.lexists(path / MANIFEST)]


def passed_over(folder: Path) -> list[Path]:
    """List paths that are named like a checkpoint later than the newest one, but are not one."""
    found, good = _named(folder), list_checkpoints(folder)
    return found[found.index(good[-1]) + 1 :] if good else found


def _named(folder: Path) -> list[Path]:
    """List the paths that have a checkpoint's name, in the order of their steps."""
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
        keep: How many to keep, at least 1; none is removed before the new one is complete.
        team: The ranks that each call this for the step. They need not do so at the same time:
            there is no collective; rank 0 waits for the others' receipts.
        spared: A step whose checkpoint is kept, whatever its age.

    Returns:
        The checkpoint's folder, complete on rank 0. If the same checkpoint exists, it stays.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf, on the rank that has it and on rank 0.
        CheckpointError: If this rank's files cannot be written; on rank 0, also if any rank's
            cannot. No incomplete checkpoint stays, and no other is removed.
    """
    final = checkpoint_path(folder, step)
    temporary = folder / f"{_TEMPORARY}{final.name}{f'-{team.token}' if team.token else ''}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if team.rank == 0:
            _remove_leftovers(folder, team)
        temporary.mkdir(exist_ok=team.size > 1)
        _write_together(part, temporary, final, team)
    except (OSError, SafetensorError, HalfstepError) as error:
        if team.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, HalfstepError):
            raise
        raise _unwritten(final, str(error)) from error
    if team.rank == 0:
        _prune(folder, keep, {final, checkpoint_path(folder, step if spared is None else spared)})
    return final


def _write_together(part: Part, temporary: Path, final: Path, team: Team) -> None:
    """Write this rank's files; on rank 0, also wait for the others' and commit."""
    report = _written(part, temporary, team)
    if team.rank:
        _hand_in(temporary, team.rank, report)
        _require_good([report], final)
        return
    try:
        reports = [report, *_receipts(temporary, final, team)]
    except CheckpointError:
        _require_good([report], final)  # this rank's own error says more than a missing receipt
        raise
    _require_good(reports, final)
    _commit(temporary, final, reports)


def _written(part: Part, temporary: Path, team: Team) -> dict[str, Any]:
    """Write a rank's files; return a report on them, or on why they could not be written."""
    if broken := part.first_nonfinite():
        return {"nonfinite": broken}
    try:
        return part.write(temporary, team.rank, team.size)
    except (OSError, SafetensorError) as error:
        return {"error": str(error)}


def _hand_in(temporary: Path, rank: int, report: dict[str, Any]) -> None:
    """Give rank 0 a receipt, also for an error, so that it does not wait in vain."""
    if "error" not in report:
        _write_receipt(temporary, rank, report)
        return
    for path in temporary.glob(f"*-{rank + 1:05d}-of-*"):  # makes room on a full disk
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
    """Refuse an existing path of the checkpoint's name, unless it is the same checkpoint."""
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
    """Merge all ranks' reports into one manifest."""
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
    """Wait for the reports of ranks 1, 2, ... and return them."""
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
    """Remove what killed saves left, but not what other ranks already write for this or later ones.

    What cannot be removed stays: that is no reason to save no checkpoint.
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
        try:  # rename first, so that a kill leaves no half-deleted checkpoint under its name
            shutil.rmtree(old.rename(folder / f"{_TEMPORARY}{old.name}"))
        except OSError as error:
            raise CheckpointError(f"old checkpoint {old} cannot be removed: {error}") from error


def load_checkpoint(
    path: Path, wanted: Mapping[str, Piece] | None = None, kinds: Collection[str] | None = None
) -> Checkpoint:
    """Read a checkpoint, or a rank's pieces of it, whatever layout saved it.

    Args:
        path: The checkpoint's folder.
        wanted: For every parameter, the piece that this rank holds; its moments are read in the
            same piece. None reads whole tensors.
        kinds: The KEYs of the optimizer's tensors ``NAME/KEY`` that are read; None reads them all.

    Returns:
        Tensors in new memory. A moment in 8-bit codes comes with its block tops, bit for bit, if
        its piece is one that a rank saved; otherwise it comes decoded to fp32, which
        :func:`convert_optimizer_tensors` converts to the run's format.

    Raises:
        CheckpointError: If it is missing, incomplete, damaged, foreign, of a newer format, of
            another step than its folder's name says or, where pieces are wanted, of another model;
            the message names the file and the tensor.

    Every file is checked against its SHA-256 before anything is read from it. With ``wanted``, only
    the files that hold some of it are read, so that N ranks need not each read everything.
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
                kind = name.rpartition("/")[2]
                if section == OPTIMIZER and kinds is not None and kind not in kinds:
                    continue
                piece = _wanted(path, section, name, entry, wanted or {})
                tensors |= reader.tensor(section, name, piece)
    return Checkpoint(found[WEIGHTS], found[OPTIMIZER], state, dict(wanted or {}))


def _require_step(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint under another step's name, after which steps would be miscounted.

    A folder without a step in its name may hold any step.
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
    raise CheckpointError(
        f"{manifest}: format {str(raw.get('format'))[:40]!r}, this halfstep reads {FORMAT}"
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
    """Return the piece of a tensor that matches its parameter's wanted piece; None means all."""
    piece = wanted.get(name if section == WEIGHTS else name.rpartition("/")[0])
    if piece is None or not entry.shape or piece.local == piece.shape:
        return None
    if entry.shape != piece.shape:
        raise CheckpointError(
            f"{path}: {name} has shape {entry.shape}, its parameter {piece.shape}: it cannot be "
            f"cut into pieces as the parameter is; resume on ranks that hold the parameter whole"
        )
    return piece
