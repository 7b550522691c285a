"""Executes a whole run in its folder, for the commands and for :class:`halfstep.Trainer`.

A run folder holds::

    config.toml     the resolved configuration
    env.json        the machine that it ran on
    metrics.jsonl   one JSON object per step
    health.jsonl    each layer's numbers and alarms: one JSON object per measured step
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
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import torch

from halfstep.diagnostics.metrics import METRICS
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, NonFiniteError, SpikeError
from halfstep.files import Where, write_whole
from halfstep.precision.policy.spelling import parse_policy
from halfstep.report.findings import verdict
from halfstep.report.record import read_run
from halfstep.trainer.checkpoint import (
    EXPORTED,
    Checkpoint,
    Exported,
    checkpoint_path,
    exported,
    folders_of,
    list_checkpoints,
    load_checkpoint,
    reached,
    require_writable,
    set_aside,
)
from halfstep.trainer.config.config import (
    config_to_toml,
    dotted,
    load_config,
    read_table,
)
from halfstep.trainer.config.run import BaseConfig, RunConfig
from halfstep.trainer.environment import environment
from halfstep.trainer.loop import Tick, train, way_on
from halfstep.trainer.session import Session

Config = TypeVar("Config", bound=BaseConfig)
Say = Callable[[str], None]
Resume = Literal["", "newest", "last-good"]
"""Where a run begins: anew, at its newest checkpoint, or at the newest that can be read."""

# Files that a process may have left when it was killed while it created the folder.
_UNFINISHED = {"run.lock", "tokenizer", "prompt.json", "env.json", "config.toml.tmp"}

_LEFT: dict[str, object] = {
    "optimizer.adjust_lr": "match_rms_adamw",
    "schedule.decay_ratio": 0.2,
    "schedule.on_skip": "hold",
    "run.agree_every": 100,
    "run.background_save": True,
    "data.format": "auto",
    "data.drop_long": "truncate",
    "run.simulate": True,  # which the policy says too
}
"""Keys that version 0.2 had, and values that need no word; nor does an empty one or "none"."""


def default_run_folder(config: BaseConfig, device: torch.device) -> Path:
    """Return ``runs/NAME-PRECISION-TIME``, the folder of a run that was given none."""
    name = f"{config.name}-{parse_policy(config.precision, device)}"
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    # file systems allow 255 bytes for a name, of which a character may have four
    return Path("runs") / f"{safe[:56]}-{time.strftime('%Y%m%d-%H%M%S')}"


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
            "another --output-dir; in a program: Trainer.train(resume=True), or another output_dir="
        )
    if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - _UNFINISHED):
        raise ConfigError(f"run.output_dir={path} exists and is not an empty folder")


def begin(world: World, path: Path, how: Resume) -> Resume:
    """Where to begin in a run's folder; a launcher's later attempt goes on with its own run.

    Raises:
        ConfigError: As :func:`require_fresh` does, for a new run.
    """
    # only rank 0 looks, as a shared file system may show a new folder to others later
    held = world.share("held" if is_run(path) else "")
    before = world.remember(f"a run in {path}", held)
    if world.attempt > 0 and (how or (held and not before)):
        return "last-good"  # nobody is there to choose
    if not how:
        world.main_only(lambda: require_fresh(path))
    return how


def create_run(path: Path, session: Session) -> IO[str]:
    """Make the folder, lock it as :func:`lock_run` does, and write what describes the run.

    Raises:
        ConfigError: If another process made it in the meantime.
        OSError: If it cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = lock_run(path)
    try:
        require_fresh(path)  # another process may have made a run of it in the meantime
        _require_free(*folders_of(session.config.run, path))
        session.task.save(path)
        report = environment(session.device) | {"auto": session.auto}
        (path / "env.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        # last: its presence makes the folder a run
        write_whole(path / "config.toml", config_to_toml(session.config))
    except BaseException:
        lock.close()
        raise
    return lock


def lock_run(path: Path) -> IO[str]:
    """Lock a run's folder for writing, until the file is closed or the process ends.

    Raises:
        ConfigError: If another process is writing there.
    """
    file = (path / "run.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"run.output_dir={path} is being written by another process; wait for it, or choose "
            "another --output-dir"
        ) from None
    return file


def run_config(path: Path, notes: list[str] | None = None) -> BaseConfig:
    """Read the configuration that a run was started, or last resumed, with.

    A key of another version of halfstep is left out; ``notes`` takes a sentence on each that had
    another value than its default there.

    Raises:
        ConfigError: If the folder holds no run of a trainer.
    """
    if not is_run(path):
        raise ConfigError(f"{path} holds no run (no config.toml); give the folder of a run")
    if read_table(str(path / "config.toml"))[1].keys() <= {"name", "precision"}:
        raise ConfigError(
            f"{path} is a run of halfstep.Recorder, whose model is your program's; allowed: "
            f"halfstep report {path}"
        )
    unknown: dict[str, object] = {}
    config = load_config(str(path / "config.toml"), unknown=unknown)
    if notes is not None:
        notes += (
            f"this version does not know {key} = {value!r}: it is left out"
            for key, value in unknown.items()
            if value and value != _LEFT.get(key, "none")
        )
    return config


def finish_run(session: Session, path: Path) -> str:
    """Write what a finished run leaves to its user, from its best state; return a message.

    On rank 0 alone. The message is empty where nothing is written.
    """
    session.report_best(path)  # a kill may have come between a checkpoint and its report

    def best() -> Exported:
        step = session.best.step if session.best and session.task.keeps_best else None
        found = _of_step(step, folders_of(session.config.run, path))
        return exported(load_checkpoint(found[-1], kinds=EXPORTED))

    return session.task.finish(path, best)


def _require_free(*folders: Where) -> None:
    if held := list_checkpoints(*folders):
        raise ConfigError(
            f"{held[-1]} exists already; choose an empty folder for run.checkpoint_dir and "
            "run.second_dir, or go on with its run by --resume"
        )


def _of_step(step: int | None, folders: list[Any]) -> list[Any]:
    """The checkpoints of a step, or all, in a run's folders, oldest first."""
    found, lost = reached(folders)
    if lost and not found:
        raise lost
    return [c for c in found if step is None or str(c).endswith(checkpoint_path("", step))]


# Settings that a resumed run may change: its length (which stretches the cosine), what it reports,
# how ranks and micro-batches share the same batches, and where the data are, as their hashes tell.
RESUMABLE = frozenset(
    {"on_nonfinite", "on_spike", "parallel", "grad_accum", "compile",
     "rank_timeout", "max_steps", "min_steps", "epochs", "eval_every",
     "eval_batches", "lost_update_every", "health_every", "watch", "save_every", "keep",
     "output_dir", "checkpoint_dir", "second_dir", "save_deadline",
     "data.train", "data.validation", "data.dev"}
)  # fmt: skip


def resume(
    session: Session,
    checkpoints: Where | list[Any],
    how: Resume = "newest",
    say: Say = lambda _: None,
    before: Iterable[Where] = (),
) -> Any:
    """Restore a session from the newest checkpoint of a folder or several; return it, or None.

    It may also be in the folders that the run had ``before``.

    Where ``how`` is ``"last-good"``, one that cannot be read on some rank is told, and set aside,
    and a folder that cannot be reached is told, if there is a checkpoint in another.
    """
    folders = checkpoints if isinstance(checkpoints, list) else [checkpoints]
    world, damaged = session.world, []
    loaded: dict[str, Checkpoint] = {}
    every = [*folders, *(folder for folder in before if folder not in folders)]
    found = world.gather(lambda: _reached(every, how, say) if world.is_main else [])[0]

    def load() -> CheckpointError | None:
        try:
            loaded["it"] = load_checkpoint(place, session.shards, world=world)
        except CheckpointError as error:
            return error
        return None

    for place in reversed(found):
        errors = [error for error in world.gather(load) if error]
        if not errors:
            break
        if how != "last-good" or place == found[0]:
            raise errors[0]
        say(f"note: {errors[0]}; it is set aside")
        damaged.append(place)
    else:
        return None
    session.restore(loaded["it"], place)
    world.main_only(lambda: [*map(set_aside, damaged)])
    best = session.best
    if best and not world.share("kept" * (world.is_main and any(_of_step(best.step, folders)))):
        session.best = None  # its checkpoint is gone, so a later evaluation must become the best
    return place


def _reached(folders: list[Any], how: Resume, say: Say) -> list[Any]:
    """The checkpoints to go on from, oldest first."""
    found, lost = reached(folders)
    if lost and not (found and how == "last-good"):
        raise lost
    if lost:
        say(f"note: {lost}; what is there is passed over")
    return found


def resumed(
    saved: BaseConfig, wanted: Config, path: Path, *, other_precision: bool = False
) -> Config:
    """Return the configuration to go on with, whose ``auto`` means the policy that the run has.

    Another precision is possible where the user asked for it by name, because a checkpoint holds
    exact masters.

    Raises:
        ConfigError: Naming every key by which it would compute something else.
    """
    if isinstance(wanted.precision, str):
        wanted = replace(wanted, precision=saved.precision)
    if wanted.run.compile == "auto":  # whose last bits may be others
        wanted = replace(wanted, run=replace(wanted.run, compile=saved.run.compile))
    # RESUMABLE spells keys of the section run without it
    a, b = ({k.removeprefix("run."): v for k, v in dotted(c).items()} for c in (saved, wanted))
    allowed = RESUMABLE | {"name"} | ({"precision"} if other_precision else set())
    changed = [key for key in a if a[key] != b.get(key) and key not in allowed]
    if changed:
        listed = ", ".join(f"{key}={b.get(key)!r} (the run has {a[key]!r})" for key in changed)
        raise ConfigError(f"--resume cannot change {listed}; start a new run for that")
    return with_run_folder(wanted, path)


def with_run_folder(config: Config, path: Path) -> Config:
    """Return the configuration with ``run.output_dir`` set to its run folder."""
    return replace(config, run=replace(config.run, output_dir=str(path)))


# A whole run.


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended."""

    last: Tick | None
    """The last step's tick; None where there was nothing left to do."""
    written: str
    """A message about the files that the run leaves; empty on ranks other than 0."""
    verdict: str = ""
    """How the run went, in a line, and in another what to type; likewise."""

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run early, with a checkpoint."""
        return self.last is not None and self.last.stopped_by.startswith("SIG")


def execute(
    session: Session,
    path: Path,
    say: Say,
    ticked: Callable[[Tick], None],
    *,
    resuming: Resume = "",
) -> RunOutcome:
    """Train a session to its end in its run folder; all ranks call it.

    ``say`` prints a line for the user, ``ticked`` is called after each step, on every rank. Where
    ``resuming``, a new session goes on from one of the folder's checkpoints. After a NonFiniteError
    the best state is written all the same, where the task keeps it, and the message says where.
    """
    world, last = session.world, None
    with ExitStack() as stack:
        stack.callback(session.task.close)
        _introduce(session, say)
        if resuming != "last-good":  # which goes on where a folder cannot be reached
            given = filter(None, (session.config.run.checkpoint_dir, session.config.run.second_dir))
            world.main_only(lambda: [*map(require_writable, given)])
        opened = lock_run if resuming else partial(create_run, session=session)
        if (lock := world.main_only(lambda: opened(path))) is not None:
            stack.enter_context(lock)
        stack.push(partial(_say_how_to_go_on, session.config))
        if resuming:
            _go_on(session, path, resuming, say)
        try:
            for last in train(session, path):
                ticked(last)
        except (NonFiniteError, SpikeError) as error:
            if session.best is None or not session.task.keeps_best:
                raise
            best = world.main_only(lambda: finish_run(session, path))
            error.args = (f"{error.args[0]}; the best state before it: {best}",)
            raise
        written = ""
        if not RunOutcome(last, "").interrupted:
            written = world.main_only(lambda: finish_run(session, path)) or ""
        policy = session.precision.policy
        judged = world.main_only(lambda: verdict(read_run(path, policy))) or ""
        return RunOutcome(last, written, judged)


def _say_how_to_go_on(
    config: BaseConfig, _: object, error: BaseException | None, __: object
) -> None:
    if isinstance(error, KeyboardInterrupt):  # of a second signal, or outside of the steps
        error.args = (f"go on: {way_on(config)}",)


def _introduce(session: Session, say: Say) -> None:
    config, support, size = session.config, session.precision.support, session.world.size
    layout = f", {size} ranks as {session.strategy.layout}" if size > 1 else ""
    say(
        f"{config.name} {config.precision}: {session.task.summary()}, on {session.device}{layout} "
        f"({support.status}: {support.reason})"
    )
    notes = []
    if session.auto:
        notes.append(f"precision auto took {config.precision}: {session.auto}")
    notes += session.task.notes
    if config.run.compile == "yes" and support.status == "simulated":
        notes.append("--compile has no effect: torch compiles nothing around a simulation")
    for note in notes:
        say(f"note: {note}")


def _require_unsaved(path: Path, run: RunConfig) -> None:
    """Refuse to begin a run again that must have saved: its disk may not be mounted."""
    last = 0
    with suppress(OSError, ValueError, KeyError):
        last = json.loads((path / METRICS).read_text(encoding="utf-8").splitlines()[-1])["step"]
    if 0 < run.save_every <= last:
        raise CheckpointError(
            f"{path} has {last} steps in {METRICS}, and {folders_of(run, path)[0]} no checkpoint; "
            "bring its checkpoints back, or begin anew in another --output-dir"
        )


def _go_on(session: Session, path: Path, how: Resume, say: Say) -> None:
    notes: list[str] = []
    saved, now = run_config(path, notes), session.config.precision
    before, earlier = saved.precision, folders_of(saved.run, path)
    for note in notes:
        say(f"note: {note}")
    second = session.config.run.second_dir
    if second and second not in earlier:
        session.world.main_only(lambda: _require_free(second))
    origin = resume(session, folders_of(session.config.run, path), how, say, earlier)
    if origin is None and not session.world.attempt:
        session.world.main_only(lambda: _require_unsaved(path, session.config.run))
    session.world.main_only(
        lambda: write_whole(path / "config.toml", config_to_toml(session.config))
    )
    say(f"resumed from {origin or 'the start: no checkpoint had been written'}")
    if before != now:
        say(f"the precision changes from {before} to {now}")
