"""Captures: a step that no loss scale could cure, kept whole so that it can be replayed.

A capture is a checkpoint of the state before the step, in ``captures/`` of the run folder, with
what the step found beside it. Its batch is not in it: that follows from data, seed and step.
``halfstep replay`` replays the step: ``replay.py``.
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep.diagnostics.metrics import CAPTURES
from halfstep.distributed.world import SAVING_SECONDS
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.precision.scaling.gradients import Judged
from halfstep.trainer.checkpoint.store import Team, save_part
from halfstep.trainer.session import Session

_KEY, RANKS = "captured", "captured_ranks"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step found, and the number of threads that it was computed with."""

    reason: str
    loss: float
    grad_norm: float
    threads: int

    def same_bits(self, other: Finding) -> bool:
        """Whether loss, norm and reason are equal in every bit; a NaN equals a NaN."""
        mine, theirs = ((f.reason, f.loss.hex(), f.grad_norm.hex()) for f in (self, other))
        return mine == theirs

    def to_json(self) -> dict[str, Any]:
        """All fields, with the bits of loss and norm as text."""
        found = dataclasses.asdict(self)
        return found | {key: found[key].hex() for key in ("loss", "grad_norm")}


def finding(judged: Judged) -> Finding:
    """What was found about a step that must not be applied."""
    return Finding(str(judged.reason), judged.loss, judged.norm, torch.get_num_threads())


def recorder(session: Session, folder: Path, keep: int) -> Callable[[Judged], None]:
    """A function that writes a capture of the step that the session is taking, and keeps a few.

    Several ranks write it together. Where one cannot be written, training goes on with a warning,
    which is given once.
    """
    failed, world = False, session.world
    token = world.share(secrets.token_hex(8))

    def record(judged: Judged) -> None:
        nonlocal failed
        checkpoint = session.checkpoint()
        state = {**checkpoint.state, _KEY: finding(judged).to_json(), RANKS: world.size}
        whole = dataclasses.replace(checkpoint, state=state)
        try:
            part = whole.part(world.rank, session.step)
            attempt = f"{token}.{session.step}" if world.size > 1 else ""
            team = Team(world.rank, world.size, attempt, SAVING_SECONDS / 2)
            save_part(folder / CAPTURES, session.step, part, keep, team)
        except HalfstepError as error:
            if not failed:
                failed = True
                text = f"no capture of step {session.step + 1}: {error}; training goes on"
                warnings.warn(text, stacklevel=2)

    return record


def captured(state: dict[str, Any], where: Path) -> Finding:
    """Read what a captured step found, from a file that may come from anywhere.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    found = state.get(_KEY)
    fields = {"reason": str, "loss": str, "grad_norm": str, "threads": int}
    if isinstance(found, dict) and set(found) == set(fields):
        plain = all(type(found[key]) is kind for key, kind in fields.items())
        if plain and 1 <= found["threads"] <= 4096:
            try:
                loss, norm = (float.fromhex(found[key]) for key in ("loss", "grad_norm"))
                return Finding(found["reason"][:40], loss, norm, found["threads"])
            except (ValueError, OverflowError):
                pass
    raise CheckpointError(
        f"{where}: no capture: its state has no readable entry {_KEY!r}; allowed: a folder that "
        f"run.capture wrote into {CAPTURES}/ of a run"
    )
