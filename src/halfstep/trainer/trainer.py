"""The public ``Trainer``: trains a user's module, dataset and loss by the commands' own loop."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, default_collate

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan, plan_of
from halfstep.distributed.world import World, broadcast_tensors_, open_world
from halfstep.errors import ConfigError
from halfstep.precision.border import require_model
from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.run import OptimizerConfig, ScheduleConfig, did_you_mean
from halfstep.trainer.config.tasks import FinetuneRunConfig, ModuleConfig
from halfstep.trainer.environment import choose_device, keep_freed_memory
from halfstep.trainer.loop import Tick
from halfstep.trainer.models.pretrained import new_folder
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
from halfstep.trainer.step import Batch, Evaluation, Judge, to_device
from halfstep.trainer.tasks.epochs import EpochTask
from halfstep.trainer.tasks.task import dropout_seed, micro_batches, share_of

Loss = Callable[[nn.Module, Any], Tensor]
Measure = Callable[[nn.Module, Any], Mapping[str, Tensor | float]]
_SECTIONS: Mapping[str, type] = {
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "run": FinetuneRunConfig,
}
_KEYS = {
    field.name: section
    for section, kind in _SECTIONS.items()
    for field in dataclasses.fields(kind)
    if field.name not in ("name", "decay")
}
"""Setting name to its section. The two left out are explicit arguments of ``Trainer``."""


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
        self.model, self.train_data, self.loss = model, train_data, loss
        self.val_data, self.evaluate, self.best_by = val_data, evaluate, best_by
        self.targets, self.collate, self.num_workers = targets, collate, num_workers
        # None: what the configuration names
        self.optimizer = None if isinstance(optimizer, str) else optimizer
        self.schedule = None if isinstance(schedule, str) else schedule
        self.plan = plan
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
            self._silent = self._quiet or not world.is_main
            opens = partial(ModuleTask, self)
            self.session = session = open_session(config, world=world, opens=opens)
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


# The task behind it.


class ModuleTask(EpochTask):
    """A module, a loss and a dataset: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: ModuleConfig

    def __init__(self, given: Trainer, config: ModuleConfig, world: World, layout: Layout) -> None:
        """Copy rank 0's weights of the module to all ranks; ``given`` has what the user gave."""
        self.model = given.model
        self.evaluates = self.keeps_best = given.val_data is not None
        self.notes: list[str] = []
        self._given = given
        if world.size > 1:
            broadcast_tensors_([*self.model.parameters(), *self.model.buffers()])
        self.deal(config, np.ones(len(given.train_data)))  # an item counts as one token
        shapes = "".join(f"{n} {tuple(p.shape)} " for n, p in self.model.named_parameters())
        self.identity = {
            "model": hashlib.sha256(shapes.encode()).hexdigest(),
            "data": f"{len(given.train_data)} items",
        }
        world.require_same(self.identity)
        self._share = layout.batch_rank(world.rank), layout.batch_ranks
        self._train = _Seeded(given.train_data)
        self._made: Iterator[Any] = iter(())
        """Batches that worker processes make ahead of time."""
        self._order: Iterator[tuple[int, range]] = iter(())
        """Step and rows of each of them."""

    def summary(self) -> str:
        """Describe the run by its numbers of parameters and training items."""
        count = sum(p.numel() for p in self.model.parameters())
        return f"{count:,} parameters, {len(self._given.train_data):,} training items"

    def plan(self, layout: Layout) -> ParallelPlan:
        """Return the user's plan, or else the module's own if the layout splits the module."""
        if self._given.plan is not None:
            return self._given.plan
        splits = layout.shard > 1 or layout.tensor > 1
        return plan_of(self.model) if splits else ParallelPlan(blocks=())

    def optimizer(self, policy: PrecisionPolicy) -> Optimizer:
        """Return the user's optimizer, or else the one that the configuration names."""
        given = self._given.optimizer
        if given is None:
            return super().optimizer(policy)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = given if isinstance(given, Optimizer) else given(trained)
        own = {id(p) for p in trained}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "Trainer(optimizer) holds parameters that the model does not have, or no longer "
                "has since it was laid out over the ranks; give a function instead, such as "
                "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
            )
        return optimizer

    def learning_rate(self, peak: float, applied: int) -> float:
        """Follow the user's schedule, applied steps (from 0) to factor, or the configuration's."""
        if self._given.schedule is None:
            return super().learning_rate(peak, applied)
        return peak * float(self._given.schedule(applied))

    def batch(self, step: int, rows: range) -> Batch:
        """Return what ``collate`` makes of the rows' items; depends on seed, step and rows only."""
        if not self._given.num_workers:
            return self._given.collate(self._train.__getitems__(self._keys(step, rows)))
        # not the batch that the loader makes next: the first one, or one after a resume
        if next(self._order, None) != (step, rows):
            self._order = self._plan(step, rows)
            next(self._order)
            keys = (self._keys(*place) for place in self._plan(step, rows))
            self._made = iter(
                DataLoader(
                    self._train,
                    batch_sampler=keys,
                    num_workers=self._given.num_workers,
                    collate_fn=self._given.collate,
                )
            )
        return next(self._made)

    def _keys(self, step: int, rows: range) -> list[tuple[int, int]]:
        seed = dropout_seed(self.config.run.seed + 1, step, rows.start)
        indices = self.batches.indices(step).tolist()
        return [(seed, indices[row]) for row in rows]

    def _plan(self, step: int, rows: range) -> Iterator[tuple[int, range]]:
        """Yield this rank's micro-batches from these rows on, to the end of the run."""
        run = self.config.run
        for later in range(step, run.max_steps):
            for part in micro_batches(self.batch_size(later), *self._share, run.grad_accum):
                if later > step or part.start >= rows.start:
                    yield later, part

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the user's mean loss times its count."""
        mean, count = self._given.loss(self.model, batch), self.targets(batch)
        if not count:  # a mean over nothing is NaN, and adds nothing
            mean = mean.nan_to_num(0.0, 0.0, 0.0)
        return mean * count, torch.full((), count, device=mean.device)  # not copied from the host

    def targets(self, batch: Batch) -> float:
        """Count the batch's targets by the user's function or, without one, its rows."""
        return rows_of(batch) if self._given.targets is None else self._given.targets(batch)

    @torch.no_grad()
    def evaluate(self, judge: Judge) -> Evaluation:
        """Average the measures over the validation data, every item once over all ranks."""
        sums: dict[str, list[Any]] = {}
        for batch, counts in self._validation(judge):
            with judge.around():
                measured = self._measured(batch, judge)
            for name, (total, count) in measured.items():
                held = sums.setdefault(name, [0.0, 0.0])
                if counts:
                    held[0] += total
                    held[1] += count
        names = sorted(sums)
        # the first of these waits for the device, once
        flat = judge.sum([float(value) for name in names for value in sums[name]])
        totals, every = dict(zip(names, flat[::2], strict=True)), flat[1::2]
        means = {n: totals[n] / count for n, count in zip(names, every, strict=True)}
        best_by = self._given.best_by
        by = best_by.removeprefix("-")
        others = {name: mean for name, mean in means.items() if name != "loss"}
        shown = {"validation loss": means["loss"], **others}
        return Evaluation(
            loss=means["loss"],
            targets=round(every[names.index("loss")]),
            score=-means[by] if by == "loss" or best_by != by else means[by],
            text=", ".join(f"{name} {mean:.4f}" for name, mean in shown.items()),
            measures=others,
        )

    def _measured(self, batch: Batch, judge: Judge) -> dict[str, tuple[Tensor | float, float]]:
        """Measure a batch: name to sum, which stays on the device, and count."""
        here, evaluate = to_device(batch, judge.device), self._given.evaluate
        if evaluate is None:
            return {"loss": (judge.loss_sum(here)[0].double(), float(self.targets(batch)))}
        rows = rows_of(batch)
        return {
            name: ((v.double() if isinstance(v, Tensor) else float(v)) * rows, float(rows))
            for name, v in evaluate(self.model, here).items()
        }

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write ``model/model.safetensors``: the best state's fp32 weights, and the buffers."""
        weights, buffers = exported()
        own = {n: p.detach() for n, p in self.model.named_parameters() if n not in weights}
        frozen = {n: p for n, p in own.items() if not is_sharded(p)}
        state = {n: t.to("cpu").contiguous() for n, t in {**frozen, **weights, **buffers}.items()}

        with new_folder(folder / "model", replace=True) as empty:
            safetensors.torch.save_file(state, empty / "model.safetensors", {"format": "pt"})
        said = f"weights in {folder / 'model' / 'model.safetensors'}"
        if len(frozen) < len(own):
            said += " (without frozen weights that lie in parts on the ranks)"
        return said

    def close(self) -> None:
        """Drop the DataLoader's iterator, which ends its worker processes."""
        self._made = self._order = iter(())

    def _validation(self, judge: Judge) -> Iterator[tuple[Batch, bool]]:
        """Yield a rank's batches and whether they count; collectives need all ranks to run each.

        Random augmentations of the items are the same in each evaluation.
        """
        run, data = self.config.run, _Seeded(self._given.val_data)
        size, most = len(self._given.val_data), max(1, run.batch_size // run.grad_accum)
        cuts = range(0, size, most)
        for start in cuts[: run.eval_batches * run.grad_accum or len(cuts)]:
            mine = share_of(min(most, size - start), judge.rank, judge.ranks)
            rows = [start + row for row in mine] or [start]
            seed = dropout_seed(run.seed, 0, rows[0])
            items = data.__getitems__([(seed, row) for row in rows])
            yield self._given.collate(items), bool(mine)


class _Seeded(Dataset[Any]):
    """A dataset whose random augmentations depend on the run's seed, not on the worker process.

    So a resumed run draws what an uninterrupted one would draw, with any number of workers.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        """Return the items of a batch from (seed, index) keys, which all carry the batch's seed."""
        with _drawing_from(keys[0][0]):
            indices = [index for _, index in keys]
            if hasattr(self._data, "__getitems__"):
                found: list[Any] = self._data.__getitems__(indices)
                return found
            return [self._data[index] for index in indices]


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def rows_of(batch: Batch) -> int:
    """Return dim 0 of a batch's first tensor that has dims, as the number of its rows."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    raise ConfigError(
        f"a batch of {type(batch).__name__} has no tensor whose rows could be counted; give "
        "Trainer(targets=), a function from a batch to the number of things its loss is the mean of"
    )
