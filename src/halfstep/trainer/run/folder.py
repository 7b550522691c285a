"""Creates, locks and reads the run folder, whose contents are as follows.

::

    config.toml     the resolved configuration
    env.json        the machine that it ran on
    memory.json     what a step holds, by part, as estimated before the first one
    metrics.jsonl   one JSON object per step
    numerics.jsonl  with --watch: one JSON object per watched step
    causes.jsonl    the first cause of each step that was not finite, where one was searched
    tokenizer/      enough to encode and decode text
    model/          for fine-tuning: the best state, for other programs to load
    report.txt      for a classifier: scores of its classes; also report.json
    checkpoints/    step-00000100 ...
    run.lock        held by the process that writes here
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from halfstep.diagnostics.memory.table import Memory
from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import write_whole
from halfstep.precision.policy.spelling import Auto
from halfstep.trainer.checkpoint.store import checkpoint_path, list_checkpoints, load_checkpoint
from halfstep.trainer.checkpoint.tensors import EXPORTED, Exported, exported
from halfstep.trainer.config.config import config_to_table, config_to_toml, load_config
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import environment, policy_on
from halfstep.trainer.session import Session

ENVIRONMENT = "env.json"
MEMORY = "memory.json"
CHECKPOINTS = "checkpoints"
# Files that a process may have left when it was killed while it created the folder.
_UNFINISHED = {"run.lock", "tokenizer", "prompt.json", ENVIRONMENT, MEMORY, "config.toml.tmp"}

_LONGEST = 56
"""Characters of a name before the time: file systems allow 255 bytes, four for a character."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An opened run folder; the lock is held until ``close`` or the end of the process."""

    path: Path
    _lock: IO[str]

    def close(self) -> None:
        """Release the lock, so that another process may write to the folder."""
        self._lock.close()


def default_run_folder(config: BaseConfig, device: torch.device) -> Path:
    """Return ``runs/NAME-PRECISION-TIME``, the folder of a run that was given none."""
    name = f"{config.name}-{policy_on(config.precision, device)}"
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return Path("runs") / f"{safe[:_LONGEST]}-{time.strftime('%Y%m%d-%H%M%S')}"


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, that is a ``config.toml``."""
    return (path / "config.toml").is_file()


def require_fresh(path: Path) -> None:
    """Refuse a folder for a new run if it is not empty.

    Raises:
        ConfigError: Saying what to do instead.
    """
    if is_run(path):
        raise ConfigError(
            f"run.output_dir={path} holds a run already; go on with it by --resume, or choose "
            "another --output-dir"
        )
    if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - _UNFINISHED):
        raise ConfigError(f"run.output_dir={path} exists and is not an empty folder")


def create_run(path: Path, session: Session) -> RunFolder:
    """Make the folder and write what describes the run.

    Raises:
        ConfigError: If another process made it in the meantime.
        CheckpointError: If it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path, _lock(path))
        try:
            require_fresh(path)  # another process may have made a run of it in the meantime
            session.task.save(path)
            report = environment(session.device) | {"auto": session.auto}
            (path / ENVIRONMENT).write_text(json.dumps(report, indent=1), encoding="utf-8")
            write_memory(path, session.memory)
            write_config(path, session.config)  # last: its presence makes the folder a run
        except BaseException:
            folder.close()
            raise
    except OSError as error:
        raise CheckpointError(f"run folder {path} cannot be written: {error}") from error
    return folder


def write_memory(path: Path, memory: Memory) -> None:
    """Write what a step holds; a resume rewrites it, as its precision may be another."""
    (path / MEMORY).write_text(json.dumps(memory.to_json(), indent=1), encoding="utf-8")


def write_config(path: Path, config: BaseConfig) -> None:
    """Write a run's configuration atomically; a resume rewrites it with its changed settings."""
    write_whole(path / "config.toml", config_to_toml(config))


def reopen_run(path: Path) -> RunFolder:
    """Open an existing run for writing.

    Raises:
        ConfigError: If it holds no run, or another process is writing there.
    """
    if not is_run(path):
        raise ConfigError(f"--resume: {path} holds no run (no config.toml); check --output-dir")
    return RunFolder(path, _lock(path))


def run_config(path: Path) -> BaseConfig:
    """Read the configuration that a run was started, or last resumed, with.

    Raises:
        ConfigError: If the folder holds no run.
    """
    if not is_run(path):
        raise ConfigError(f"{path} holds no run (no config.toml); give the folder of a run")
    return load_config(str(path / "config.toml"), strict=False)


def made_by_auto(path: Path) -> str:
    """Return the name of the device for which ``auto`` took a run's policy; empty if it did not."""
    try:
        found: Any = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
        return str(found["device_name"]) if found["auto"] else ""
    except (OSError, ValueError, LookupError, TypeError):  # missing, or edited
        return ""


def finish_run(session: Session, path: Path) -> str:
    """Write the files that a finished run leaves to its user, from its best state; on rank 0.

    Returns:
        A message about what was written; empty for nothing.

    Raises:
        CheckpointError: If it cannot be written, or its checkpoint is damaged.
    """
    folder = path / CHECKPOINTS
    report_best(session, path)  # a kill may have come between a checkpoint and its report

    def best() -> Exported:
        step = session.best.step if session.best and session.task.keeps_best else None
        found = list_checkpoints(folder)[-1] if step is None else checkpoint_path(folder, step)
        return exported(load_checkpoint(found, kinds=EXPORTED))

    return session.task.finish(path, best)


def report_best(session: Session, path: Path) -> None:
    """Write the task's report of the best evaluation so far; on rank 0.

    Raises:
        CheckpointError: If it cannot be written.
    """
    if session.best is None:
        return
    try:
        session.task.improved(path, session.best.step, session.best.evaluation)
    except OSError as error:
        raise CheckpointError(f"the report in {path} cannot be written: {error}") from error


def _lock(path: Path) -> IO[str]:
    try:
        file = (path / "run.lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.output_dir={path}: its run.lock cannot be opened ({error.strerror}); it must be "
            "a plain file: move away what is there"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise ConfigError(
            f"run.output_dir={path} is being written by another process ({owner}); wait for it, "
            "or choose another --output-dir"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()}\n")
    file.flush()
    return file


Config = TypeVar("Config", bound=BaseConfig)

# Settings that a resumed run may change: its length (which stretches the cosine), what it reports,
# where prepared data is kept, and how ranks, micro-batches and threads share the same batches.
RESUMABLE = frozenset(
    {"data.cache_dir", "on_nonfinite", "on_spike", "capture", "parallel", "grad_accum",
     "rank_timeout", "threads", "max_steps", "max_seconds", "epochs", "eval_every",
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
