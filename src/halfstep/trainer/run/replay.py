"""Takes a captured step again, in a new process, in the same precision or in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from halfstep.diagnostics.capture import Finding, Replayed, finding
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError, SpikeError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import OnNonFinite, OnSpike
from halfstep.precision.scaling.gradients import Judged
from halfstep.trainer.checkpoint.store import load_checkpoint
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.data.token_file import no_progress
from halfstep.trainer.loop import attempt
from halfstep.trainer.run.capture import RANKS, captured
from halfstep.trainer.session import Session, open_session


def replay(path: Path, precision: str = "", world: World = World.alone()) -> Replayed:  # noqa: B008
    """Rebuild a run from a capture, and take the captured step; all ranks call it.

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
    guarded = OnSpike("off" if config.run.on_spike.action == "off" else "stop")
    run = replace(
        config.run, on_nonfinite=OnNonFinite(), on_spike=guarded, capture=0, report_to=(),
        threads=before.threads,
    )  # fmt: skip
    data = replace(config.data, cache_dir="")  # nothing is written where a capture says
    config = replace(config, precision=policy, run=run, data=data)
    threads = torch.get_num_threads()
    try:
        session = open_session(config, no_progress, resuming=True, world=world)
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
