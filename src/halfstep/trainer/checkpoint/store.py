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

It is written under a temporary name, every file and folder is synced, then it is renamed: a folder
with the final name is complete (``commit.py``). No file format sees a flipped
bit by itself, so loading checks every file that it reads against the manifest before anything is
changed. Nothing is ever unpickled; ``torch.distributed.checkpoint`` is not used because it reads
its ``.metadata`` with a raw unpickler, which runs what the file says (measured with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.trainer.checkpoint.commit import Team, list_checkpoints, require_step, save_part
from halfstep.trainer.checkpoint.index import (
    FORMAT,
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Entry,
    Index,
    check_index,
    read_json,
)
from halfstep.trainer.checkpoint.parts import Part, own_part
from halfstep.trainer.checkpoint.pieces import Piece
from halfstep.trainer.checkpoint.reader import Reader, first_format_index, require_sha256

__all__ = [
    "Checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a checkpoint holds, or this rank's pieces of it.

    Attributes:
        weights: Parameter name to tensor.
        optimizer: ``"NAME/KEY"`` to tensor; of format 1 also random states under ``"rng/"``.
        state: Plain JSON values; of several ranks that save, rank 0's are written. A save adds
            ``"step"`` where it is not there.
        pieces: Parameter name, or a whole key of ``optimizer``, to the piece that the tensors are.
            A parameter's moments are the same piece as it is, its step counter is whole. A tensor
            that is not in here is whole, and rank 0 writes it.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    pieces: Mapping[str, Piece] = field(default_factory=dict)

    def part(self, rank: int, step: int) -> Part:
        """What a rank writes of it as this step; shares memory with the tensors.

        Raises:
            CheckpointError: If a tensor does not have its piece's shape, or the state says that it
                is of another step.
        """
        state = {"step": step, **self.state}
        if state["step"] != step:
            found = str(state["step"])[:40]
            raise CheckpointError(f"a state of step {found} cannot be saved as that of step {step}")
        return own_part(self.weights, self.optimizer, state, self.pieces, rank)


def save_checkpoint(
    folder: Path,
    step: int,
    checkpoint: Checkpoint,
    keep: int,
    team: Team = Team(),  # noqa: B008  (frozen)
) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``.

    Args:
        folder: The run's ``checkpoints`` folder, which all ranks share; made if absent.
        step: Optimizer steps taken.
        checkpoint: What to write; every weight and moment must be finite.
        keep: How many to keep, at least 1; none is removed before the new one is safely there.
        team: The ranks that each call this for the step. They need not do so at the same time:
            there is no collective; rank 0 waits for the others' receipts.

    Returns:
        The checkpoint's folder; the same checkpoint, if it is there, stays as it is. It is complete
        when rank 0 returns.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf, on the rank that has it and on rank 0;
            nothing stays written and nothing is removed, so the last finite checkpoint stays.
        CheckpointError: If it cannot be written (full disk, no permission), something else is
            there under its name, or ``checkpoint.state["step"]`` is another step; on rank 0 also if
            another rank could not or has not answered in time. Nothing half-made and nothing
            removed.
    """
    return save_part(folder, step, checkpoint.part(team.rank, step), keep, team)


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
    require_step(path, state)
    if wanted is not None:
        _require_model(path, index.tensors[WEIGHTS], wanted)
    found: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    with Reader(path, index) as reader:
        if wanted is None:
            reader.open_all()
        for section, tensors in found.items():
            for name, entry in index.tensors[section].items():
                piece = _wanted(path, section, name, entry, wanted or {})
                tensors |= reader.tensor(section, name, piece)
    return Checkpoint(found[WEIGHTS], found[OPTIMIZER], state, dict(wanted or {}))


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
