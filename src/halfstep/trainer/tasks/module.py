"""The task behind :class:`halfstep.Trainer`: a user's own module, loss and dataset."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, default_collate

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan, plan_of
from halfstep.distributed.world import World, broadcast_tensors_
from halfstep.errors import ConfigError
from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.tasks import ModuleConfig
from halfstep.trainer.models.pretrained import new_folder
from halfstep.trainer.step import Batch, Evaluation, Judge, to_device
from halfstep.trainer.tasks.epochs import EpochTask
from halfstep.trainer.tasks.task import dropout_seed, micro_batches, share_of

Loss = Callable[[nn.Module, Any], Tensor]
Measure = Callable[[nn.Module, Any], Mapping[str, Tensor | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a user passes to :class:`halfstep.Trainer`, which documents each argument."""

    model: nn.Module
    train_data: Any
    loss: Loss
    val_data: Any = None
    evaluate: Measure | None = None
    targets: Callable[[Any], float] | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None
    """None: the optimizer that the configuration names."""
    schedule: Callable[[int], float] | None = None
    """None: the schedule that the configuration names."""
    plan: ParallelPlan | None = None
    best_by: str = "loss"


class ModuleTask(EpochTask):
    """A module, a loss and a dataset: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: ModuleConfig

    def __init__(self, parts: Parts, config: ModuleConfig, layout: Layout, world: World) -> None:
        """Store the parts, and copy rank 0's weights of the module to all ranks."""
        self.model = parts.model
        self.evaluates = self.keeps_best = parts.val_data is not None
        self.notes: list[str] = []
        self._parts = parts
        if world.size > 1:
            broadcast_tensors_([*self.model.parameters(), *self.model.buffers()])
        self.deal(config, np.ones(len(parts.train_data)))  # an item counts as one token
        shapes = "".join(f"{n} {tuple(p.shape)} " for n, p in self.model.named_parameters())
        self.identity = {
            "model": hashlib.sha256(shapes.encode()).hexdigest(),
            "data": f"{len(parts.train_data)} items",
        }
        world.require_same(self.identity)
        self._share = layout.batch_rank(world.rank), layout.batch_ranks
        self._train = _Seeded(parts.train_data)
        self._made: Iterator[Any] = iter(())
        """Batches that worker processes make ahead of time."""
        self._order: Iterator[tuple[int, range]] = iter(())
        """Step and rows of each of them."""

    def summary(self) -> str:
        """Describe the run by its numbers of parameters and training items."""
        count = sum(p.numel() for p in self.model.parameters())
        return f"{count:,} parameters, {len(self._parts.train_data):,} training items"

    def plan(self, layout: Layout) -> ParallelPlan:
        """Return the user's plan, or else the module's own if the layout splits the module."""
        if self._parts.plan is not None:
            return self._parts.plan
        splits = layout.shard > 1 or layout.tensor > 1
        return plan_of(self.model) if splits else ParallelPlan(blocks=())

    def optimizer(self, policy: PrecisionPolicy) -> Optimizer:
        """Return the user's optimizer, or else the one that the configuration names."""
        given = self._parts.optimizer
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
        if self._parts.schedule is None:
            return super().learning_rate(peak, applied)
        return peak * float(self._parts.schedule(applied))

    def batch(self, step: int, rows: range) -> Batch:
        """Return what ``collate`` makes of the rows' items; depends on seed, step and rows only."""
        if not self._parts.num_workers:
            return self._parts.collate(self._train.__getitems__(self._keys(step, rows)))
        # not the batch that the loader makes next: the first one, or one after a resume
        if next(self._order, None) != (step, rows):
            self._order = self._plan(step, rows)
            next(self._order)
            keys = (self._keys(*place) for place in self._plan(step, rows))
            self._made = iter(
                DataLoader(
                    self._train,
                    batch_sampler=keys,
                    num_workers=self._parts.num_workers,
                    collate_fn=self._parts.collate,
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
        mean, count = self._parts.loss(self.model, batch), self.targets(batch)
        if not count:  # a mean over nothing is NaN, and adds nothing
            mean = mean.nan_to_num(0.0, 0.0, 0.0)
        return mean * count, torch.full((), count, device=mean.device)  # not copied from the host

    def targets(self, batch: Batch) -> float:
        """Count the batch's targets by the user's function or, without one, its rows."""
        return rows_of(batch) if self._parts.targets is None else self._parts.targets(batch)

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
        best_by = self._parts.best_by
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
        here, evaluate = to_device(batch, judge.device), self._parts.evaluate
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
        run, data = self.config.run, _Seeded(self._parts.val_data)
        size, most = len(self._parts.val_data), max(1, run.batch_size // run.grad_accum)
        cuts = range(0, size, most)
        for start in cuts[: run.eval_batches * run.grad_accum or len(cuts)]:
            mine = share_of(min(most, size - start), judge.rank, judge.ranks)
            rows = [start + row for row in mine] or [start]
            seed = dropout_seed(run.seed, 0, rows[0])
            items = data.__getitems__([(seed, row) for row in rows])
            yield self._parts.collate(items), bool(mine)


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
