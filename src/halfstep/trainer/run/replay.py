"""Replays a captured step in a new process, in the same precision or in another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError, SpikeError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import Recovery
from halfstep.precision.scaling.gradients import Judged
from halfstep.trainer.checkpoint.store import load_checkpoint
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.data.token_file import no_progress
from halfstep.trainer.loop import attempt
from halfstep.trainer.run.capture import RANKS, Finding, captured, finding
from halfstep.trainer.session import Session, open_session


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
    def survives(self) -> bool:
        """Whether the step could be applied."""
        return self.found.reason == "applied"

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.precision != self.captured_precision:
            would = "would" if self.survives else "would not"
            return f"{self.precision} {would} have survived"
        if self.repeated:
            return "the step repeats bit for bit: the batch, the weights or the model make it"
        return "the step does not repeat: another machine, another torch, or a fault that is gone"


def replay(path: Path, precision: str = "", world: World = World()) -> Replayed:  # noqa: B008
    """Rebuild a run from a capture, and replay the captured step; all ranks call it.

    Nothing of a capture is unpickled, evaluated or fetched; its data are read from where the run's
    configuration says, and must have the hashes that the run had.

    Args:
        path: A folder in ``captures/`` of a run.
        precision: The policy to take the step in; empty: the run's own.
        world: As many ranks as the run had, in whose order gradients were added up.

    Raises:
        CheckpointError: If it is no capture, is damaged, or is of another model or other data.
        ConfigError: If its configuration cannot be run here.
    """
    path = Path(path)
    if path.is_symlink():
        raise CheckpointError(f"{path}: a link, not a capture; give the folder that it leads to")
    saved = load_checkpoint(path)
    before = captured(saved.state, path)
    ranks = saved.state.get(RANKS, 1)
    if ranks != world.size:
        raise CheckpointError(
            f"{path}: a step of {ranks!s:.10} ranks, and this is {world.size}: take it again with "
            f"torchrun --nproc-per-node {ranks!s:.10} -m halfstep replay"
        )
    config = _config(saved.state.get("config"), path)
    own = config.precision
    policy = parse_policy(precision) if precision else own
    config = _stopping(replace(config, precision=policy), before.threads)
    threads = torch.get_num_threads()
    try:
        session = open_session(config, no_progress, world=world)
        try:
            session.restore(load_checkpoint(path, session.pieces), path)
            return _take(session, before, str(own))
        finally:
            session.precision.close()
            session.task.close()
    except HalfstepError as error:
        if isinstance(error, NonFiniteError | SpikeError):
            raise CheckpointError(f"{path}: the weights in it are not usable: {error}") from error
        raise
    finally:
        torch.set_num_threads(threads)


def _stopping(config: TrainConfig, threads: int) -> TrainConfig:
    """Configure a run that stops at what it finds, and writes nothing."""
    guarded = Recovery("off" if config.run.on_spike.action == "off" else "stop")
    run = replace(
        config.run, on_nonfinite=Recovery(), on_spike=guarded, capture=0, report_to=(),
        threads=threads,
    )  # fmt: skip
    # a capture may come from a stranger: nothing is written where it says
    return replace(config, run=run, data=replace(config.data, cache_dir=""))


def _take(session: Session, before: Finding, own: str) -> Replayed:
    """Take the session's next step, and compare it with what was found before."""
    judged: list[Judged] = []
    session.precision.outcome.on_incurable = judged.append
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


def _config(table: object, where: Path) -> TrainConfig:
    """The configuration in a capture, which may come from anywhere."""
    try:
        config: BaseConfig | None = config_from_table(table) if isinstance(table, dict) else None
    except HalfstepError as error:
        raise CheckpointError(f"{where}: its configuration is damaged: {error}") from error
    if not isinstance(config, TrainConfig):
        raise CheckpointError(
            f"{where}: not a capture of halfstep train, whose runs alone can be rebuilt from one"
        )
    return config
