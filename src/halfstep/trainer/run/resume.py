"""Resumes a run from its newest checkpoint, and decides which settings may have changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from halfstep.errors import ConfigError
from halfstep.precision.policy.spelling import Auto
from halfstep.trainer.checkpoint.store import checkpoint_path, list_checkpoints, load_checkpoint
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.session import Session

Config = TypeVar("Config", bound=BaseConfig)

# Settings that a resumed run may change: its length (which stretches the cosine), what it reports,
# where prepared data is kept, and how ranks, micro-batches and threads share the same batches.
RESUMABLE = frozenset(
    {"data.cache_dir", "on_nonfinite", "on_spike", "capture", "parallel", "sequence_parallel",
     "grad_accum", "rank_timeout", "threads", "max_steps", "max_seconds", "epochs", "eval_every",
     "eval_batches", "lost_update_every", "watch", "save_every", "keep", "output_dir",
     "report_to"}
)  # fmt: skip


def resume(session: Session, checkpoints: Path) -> Path | None:
    """Restore a session from its newest checkpoint; return its path, or None if there is none yet.

    Raises:
        CheckpointError: If the newest checkpoint is damaged or of another run.
    """
    found = list_checkpoints(checkpoints)
    newest = session.world.share(str(found[-1]) if found else "")
    if not newest:
        return None
    session.restore(load_checkpoint(Path(newest), session.pieces), Path(newest))
    best = session.best
    kept = best is not None and checkpoint_path(checkpoints, best.step).is_dir()
    if not session.world.share("kept" if kept else ""):
        session.best = None  # its checkpoint is gone, so a later evaluation must become the best
    return Path(newest)


def require_resumable(
    saved: BaseConfig, wanted: BaseConfig, *, other_precision: bool = False
) -> None:
    """Refuse to resume with a configuration that computes something else.

    Args:
        saved: The run's configuration.
        wanted: The configuration to resume it with.
        other_precision: Whether the user asked for another precision by name, which is possible
            because a checkpoint holds exact masters; whether it is simulated goes with it.

    Raises:
        ConfigError: Naming every key that differs but must not.
    """
    a, b = _flat(saved), _flat(wanted)
    allowed = RESUMABLE | ({"precision", "simulate"} if other_precision else set())
    changed = [key for key in a if a[key] != b.get(key) and key not in allowed]
    if changed:
        listed = ", ".join(f"{key}={b.get(key)!r} (the run has {a[key]!r})" for key in changed)
        raise ConfigError(f"--resume cannot change {listed}; start a new run for that")


def keeping_policy(wanted: Config, saved: BaseConfig) -> Config:
    """Return the configuration to resume with: ``auto`` means the policy that the run has."""
    if not isinstance(wanted.precision, Auto):
        return wanted
    return replace(wanted, precision=saved.precision)


def with_run_folder(config: Config, path: Path) -> Config:
    """Return the configuration with ``run.output_dir`` set to its run folder."""
    return replace(config, run=replace(config.run, output_dir=str(path)))


def _flat(config: BaseConfig) -> dict[str, object]:
    """Flatten to key and value; keys of section ``run`` lose it, as ``RESUMABLE`` spells them."""
    values: dict[str, object] = {}
    for name, part in config_to_table(config).items():
        if isinstance(part, dict):
            if family := getattr(getattr(config, name), "FAMILY", ""):
                values[f"{name}.family"] = family  # which a table names where it is not the first
            values |= {key if name == "run" else f"{name}.{key}": v for key, v in part.items()}
        elif name != "name":
            values[name] = part
    return values
