"""The public ``Trainer``: trains a user's module, dataset and loss by the commands' own loop."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan
from halfstep.distributed.world import World, open_world
from halfstep.errors import ConfigError
from halfstep.precision.border import require_model
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.run import OptimizerConfig, ScheduleConfig, did_you_mean
from halfstep.trainer.config.tasks import FinetuneRunConfig, ModuleConfig
from halfstep.trainer.environment import choose_device, keep_freed_memory
from halfstep.trainer.loop import Tick
from halfstep.trainer.run import (
    Resume,
    begin,
    default_run_folder,
    execute,
    resumed,
    run_config,
    with_run_folder,
)
from halfstep.trainer.session import open_session
from halfstep.trainer.step import Evaluation
from halfstep.trainer.tasks.module import Loss, Measure, ModuleTask, Parts

_SECTIONS: Mapping[str, type] = {
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "run": FinetuneRunConfig,
}
_KEYS = {
    field.name: section
    for section, kind in _SECTIONS.items()
    for field in dataclasses.fields(kind)
    if field.name not in ("name", "decay", "best_by")
}
"""Setting name to its section. The three left out are explicit arguments of ``Trainer``."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What :meth:`Trainer.train` did.

    Attributes:
        folder: The run folder: metrics, checkpoints, and the weights in ``model/``.
        step: Steps taken so far, skipped ones included.
        evaluation: The last evaluation; None without validation data.
        best: The best evaluation; ``model/`` holds the weights that it measured.
        stopped_by: Why the run ended before its last step: ``"SIGINT"``, ``"SIGTERM"``
            or ``"stop"``; empty if it did not.
    """

    folder: Path
    step: int
    evaluation: Evaluation | None
    best: Evaluation | None
    stopped_by: str


class Trainer:
    """Trains a module of your own in any precision policy, on one device or many.

    ::

        trainer = halfstep.Trainer(
            model,
            train_data,
            lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            val_data=val_data,
            precision="bf16-mixed",
            learning_rate=3e-4,
            epochs=3,
        )
        trained = trainer.train()

    It is the loop of ``halfstep train``: gradients are sums over micro-batches and ranks divided by
    one count, a step that overflowed is skipped, told and counted, a checkpoint resumes bit for bit
    and in another precision, and a signal ends the run with a checkpoint. The same program runs on
    several ranks: ``torchrun --nproc-per-node 2 train.py``.

    Args:
        model: Trained in place and moved to the device; all ranks start from rank 0's weights.
        train_data: A map-style dataset: items by index, and a length, as in
            ``torch.utils.data.Dataset``. Each epoch has every item once, in a seeded order.
        loss: Called as ``loss(model, batch)`` under the policy's autocast. Returns a 0-dim
            tensor, the mean over what ``targets`` counts.
        val_data: Evaluated every ``eval_every`` steps, or after every epoch; the best state
            is kept.
        evaluate: Called as ``evaluate(model, batch)`` in evaluation mode; returns means over
            the batch's rows by name, among them ``loss``. None: the training loss.
        targets: Returns the number of elements that the loss of a batch is the mean of, such
            as its tokens. None: the batch's rows, which is dim 0 of its first tensor.
        collate: Makes a batch from a list of items.
        num_workers: Processes that prepare batches ahead; 0: none.
        precision: A policy, its name or field string; ``auto`` takes what
            suits the device, and says why.
        optimizer: A name (adamw, sgd, lion, ...), or a function from the trainable parameters
            to an optimizer, or an optimizer.
        schedule: ``cosine``, ``linear`` or ``constant``, each after a warm-up, or a function
            from the number of applied steps to a factor of the peak rate.
        best_by: A name that ``evaluate`` returns. The highest value is the best; for ``loss``,
            and with a ``-`` before the name, the lowest.
        callbacks: Each is called with a :class:`Tick` after each step, on every rank.
        plan: What to shard and split, where ``parallel`` does either; None: the plan that the
            model itself provides (:func:`halfstep.distributed.plan_of`).
        name: Goes into the name of the default run folder.
        quiet: Print nothing on stderr.
        **settings: Any key of the sections optimizer, schedule and run by its bare name, such
            as ``epochs``, ``max_steps``, ``batch_size``, ``grad_accum``, ``learning_rate``,
            ``warmup_steps``, ``max_norm``, ``ema_decay``, ``seed``, ``save_every``,
            ``parallel``, ``compile``, ``output_dir``, ``device``.

    Raises:
        ConfigError: For a setting that does not exist or is out of range.
        PrecisionError: For a policy or a model that is neither.
    """

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        loss: Loss,
        *,
        val_data: Any = None,
        evaluate: Measure | None = None,
        targets: Callable[[Any], float] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        precision: str | PrecisionPolicy = "auto",
        optimizer: str | Optimizer | Callable[[list[nn.Parameter]], Optimizer] = "adamw",
        schedule: str | Callable[[int], float] = "cosine",
        best_by: str = "loss",
        callbacks: Sequence[Callable[[Tick], None]] = (),
        plan: ParallelPlan | None = None,
        name: str = "module",
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        """Store what is to be trained, and check all that can be checked before training."""
        require_model(model, "Trainer(model)")
        self._config: Any = _config_of(name, precision, optimizer, schedule, settings)
        self._parts = Parts(
            model=model,
            train_data=train_data,
            loss=loss,
            val_data=val_data,
            evaluate=evaluate,
            targets=targets,
            collate=collate,
            num_workers=num_workers,
            optimizer=None if isinstance(optimizer, str) else optimizer,
            schedule=None if isinstance(schedule, str) else schedule,
            plan=plan,
            best_by=best_by,
        )
        self._callbacks = callbacks
        self._quiet = quiet
        self.session: Any = None
        """The run in memory (a ``Session``), for callbacks; None while none is trained."""

    def stop(self) -> None:
        """End the run after one more step, with an evaluation and a checkpoint; for callbacks.

        It is enough that one rank calls it.
        """
        self.session.stop_asked = True

    def train(self, *, resume: bool | Literal["last-good"] = False) -> TrainResult:
        """Train to the end; all ranks call it together.

        Args:
            resume: Go on with the run in ``output_dir`` from its newest checkpoint, bit for bit, or
                in another precision; ``"last-good"``: from the newest that can be read. Where
                ``torchrun --max-restarts`` starts the program again, it goes on so by itself.

        Raises:
            NonFiniteError: If a numerics guard stops the run; the last checkpoint is intact.
            PrecisionError: If the policy cannot be honoured here.
            HalfstepError: For a folder, layout or checkpoint that cannot be used.
        """
        run = self._config.run
        how: Resume = "newest" if resume is True else resume or ""
        if how not in get_args(Resume):
            raise ConfigError(f"train(resume={resume!r}); allowed: True, False or 'last-good'")
        if resume and not run.output_dir:
            raise ConfigError("train(resume=True) needs Trainer(output_dir=), the run's folder")
        kind = choose_device(run.device).type
        own = not (dist.is_available() and dist.is_initialized())
        world = open_world(kind, timeout_seconds=run.rank_timeout) if own else World.around_group()
        with world if own else nullcontext():
            config, path, resuming = self._placed(world, how)
            keep_freed_memory(sharded=Layout.of(config.run.parallel).shard > 1)
            self.session = session = open_session(config, world=world, opens=self._open)
            session.followed = bool(self._callbacks)
            try:
                outcome = execute(session, path, self._say, self._ticked, resuming=resuming)
            finally:
                session.precision.close()
                self.session = None
            for text in filter(None, (outcome.written, outcome.verdict)):
                self._say(text)
            last, best = outcome.last, session.best
            return TrainResult(
                path,
                session.step,
                last.evaluation if last else None,
                best.evaluation if best else None,
                last.stopped_by if last else "",
            )

    def _placed(self, world: World, how: Resume) -> tuple[Any, Path, Resume]:
        run = self._config.run
        device = choose_device(run.device, world.local_rank)
        folder = run.output_dir or str(default_run_folder(self._config, device))
        path = Path(world.share(folder))
        if not (how := begin(world, path, how)):
            return with_run_folder(self._config, path), path, how
        saved = run_config(path)
        wanted = self._config.filled(saved)
        return resumed(saved, wanted, path, other_precision=True), path, how

    def _open(self, config: Any, world: World, layout: Layout) -> ModuleTask:
        self._silent = self._quiet or not world.is_main
        return ModuleTask(self._parts, config, layout, world)

    def _say(self, text: str) -> None:
        if not self._silent:
            print(text, file=sys.stderr)

    def _ticked(self, tick: Tick) -> None:
        record = tick.record
        if not record.applied:
            scale = f" at loss scale {record.loss_scale:g}" if record.loss_scale else ""
            self._say(f"step {record.step}: skipped ({record.skip_reason}){scale}")
        for verdict in tick.verdicts:
            self._say(f"step {record.step}: {verdict}")
        if tick.evaluation is not None:
            self._say(f"step {record.step}: {tick.evaluation.text}")
        for callback in self._callbacks:
            callback(tick)


def _config_of(
    name: str, precision: object, optimizer: object, schedule: object, settings: dict[str, Any]
) -> Any:
    table: dict[str, Any] = {"name": name, "precision": str(precision)}
    # at 0 warm-up steps, run.warmup_ratio determines their number
    table |= {"optimizer": {}, "schedule": {"warmup_steps": 0}, "run": {}}
    for key, value in settings.items():
        if key not in _KEYS:
            raise ConfigError(
                f"Trainer({key}) is not a setting{did_you_mean(key, _KEYS)}; the settings are "
                f"{', '.join(_KEYS)}"
            )
        table[_KEYS[key]][key] = value
    if isinstance(optimizer, str):
        table["optimizer"]["name"] = optimizer
    if isinstance(schedule, str):
        table["schedule"]["decay"] = schedule
    return config_from_table({"task": ModuleConfig.TASK, **table})
