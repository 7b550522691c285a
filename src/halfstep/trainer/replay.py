"""Captures: a step that no loss scale could cure, kept whole, and replayed in a new process.

A capture is a checkpoint of the state before the step, in ``captures/`` of the run folder, with
what the step found beside it. Its batch is not in it: that follows from data, seed and step.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.diagnostics.metrics import CAPTURES
from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError, SpikeError
from halfstep.files import MANIFEST
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import Recovery
from halfstep.precision.scaling.gradients import Judged
from halfstep.trainer.checkpoint import (
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.data.config import no_progress
from halfstep.trainer.loop import attempt
from halfstep.trainer.session import Session, open_session

_KEY, _DRAWN = "captured", "generators"


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

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Finding:
        """Read what :meth:`to_json` returned."""
        loss, norm = (float.fromhex(found[key]) for key in ("loss", "grad_norm"))
        return cls(found["reason"], loss, norm, found["threads"])


def finding(judged: Judged) -> Finding:
    """What was found about a step that must not be applied."""
    return Finding(str(judged.reason), judged.loss, judged.norm, torch.get_num_threads())


class Capturing:
    """Writes a capture of the step that a session is taking where none can cure it; keeps a few.

    Where one cannot be written, training goes on with a warning.
    """

    def __init__(self, session: Session, folder: Path, keep: int) -> None:
        self._session, self._folder, self._keep = session, folder / CAPTURES, keep

    def begin(self) -> None:
        """Remember what NumPy and Python draw from; the step itself seeds torch."""
        self._drawn = random.getstate(), np.random.get_state()

    def write(self, judged: Judged) -> None:
        """Write the capture, before the step is answered."""
        session = self._session
        if checkpoint_path(self._folder, session.step).exists():  # of this run before a resume
            return
        checkpoint = session.checkpoint()
        python, (kind, keys, *rest) = self._drawn
        drawn = {"python": python, "numpy": [kind, np.asarray(keys).tolist(), *rest]}
        added = {_KEY: finding(judged).to_json(), _DRAWN: drawn}
        whole = dataclasses.replace(checkpoint, state={**checkpoint.state, **added})
        try:
            save_checkpoint(self._folder, session.step, whole, self._keep)
        except HalfstepError as error:
            text = f"no capture of step {session.step + 1}: {error}; training goes on"
            warnings.warn(text, stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A captured step, and its replay."""

    step: int
    """The step's number, as in ``metrics.jsonl``."""
    precision: str
    """The policy of the replay."""
    captured_precision: str
    captured: Finding
    found: Finding
    """What the replay found; the reason is ``"applied"`` if nothing was wrong."""
    unchanged: bool
    """Whether the weights after it are those before, bit for bit."""

    @property
    def repeated(self) -> bool:
        """Whether the replay found the same, bit for bit; only meant in the same precision."""
        return self.unchanged and self.found.same_bits(self.captured)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.precision != self.captured_precision:
            would = "would" if self.found.reason == "applied" else "would not"
            return f"{self.precision} {would} have survived"
        if self.repeated:
            return "the step repeats bit for bit: the batch, the weights or the model make it"
        return "the step does not repeat: what a capture holds does not determine it"


def replay(path: Path, precision: str = "") -> Replayed:
    """Rebuild a run from a capture, and replay the captured step.

    Nothing of a capture is unpickled, evaluated or fetched; its data are read from where the run's
    configuration says, and must have the hashes that the run had. ``precision`` is the policy to
    take the step in, if not the run's own.

    Raises:
        CheckpointError: If it is no capture, is damaged, or is of another model or other data.
        ConfigError: If its configuration cannot be run here.
    """
    _require_capture(path)
    saved = load_checkpoint(path)
    if _KEY not in saved.state:
        raise CheckpointError(
            f"{path}: no capture; allowed: a folder in {CAPTURES}/ of a run with run.capture"
        )
    before = Finding.from_json(saved.state[_KEY])
    config = config_from_table(saved.state["config"], unknown={})
    if not isinstance(config, TrainConfig):
        raise CheckpointError(f"{path}: only runs of halfstep train can be rebuilt from a capture")
    own = config.precision
    policy = parse_policy(precision) if precision else own
    # stops at what it finds, and writes nothing
    guarded = Recovery("off" if config.run.on_spike.action == "off" else "stop")
    run = replace(config.run, on_nonfinite=Recovery(), on_spike=guarded, capture=0)
    config = replace(config, precision=policy, run=run)
    threads, python, numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    try:
        torch.set_num_threads(before.threads)
        session = open_session(config, no_progress)
        try:
            session.restore(load_checkpoint(path, session.shards), path)
            if _DRAWN in saved.state:  # older captures have none
                _draw_from(saved.state[_DRAWN])
            return _take(session, before, str(own))
        finally:
            session.precision.close()
            session.task.close()
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)


def _require_capture(path: Path) -> None:
    """Refuse a run, and the folder of its captures, with what to type instead."""
    kept = list_checkpoints(path if path.name == CAPTURES else path / CAPTURES)
    if kept:
        raise CheckpointError(
            f"{path} is no capture, but holds some: {', '.join(each.name for each in kept)}; "
            f"write: halfstep replay {kept[-1]}"
        )
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} holds no capture; halfstep train --capture 3 keeps three")


def _draw_from(found: dict[str, Any]) -> None:
    version, state, gauss = found["python"]
    kind, keys, *rest = found["numpy"]
    random.setstate((version, tuple(state), gauss))
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def _take(session: Session, before: Finding, own: str) -> Replayed:
    judged: list[Judged] = []
    session.precision.outcome.on_broken = lambda found, _: judged.append(found)
    weights = {name: value.clone() for name, value in session.precision.masters.items()}
    try:
        result = attempt(session)
        found = Finding(
            result.reason or "applied", result.loss, result.grad_norm, torch.get_num_threads()
        )
    except (NonFiniteError, SpikeError):
        found = finding(judged[-1])
    after = dict(session.precision.masters.items())
    return Replayed(
        step=session.step + 1,
        precision=str(session.config.precision),
        captured_precision=own,
        captured=before,
        found=found,
        unchanged=all(torch.equal(weights[name], after[name]) for name in weights),
    )
