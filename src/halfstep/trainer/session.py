"""Everything a run needs, made from its configuration and checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.diagnostics.memory.table import Memory
from halfstep.distributed.layout import Layout
from halfstep.distributed.reducer import broadcast_tensors_
from halfstep.distributed.strategy import Strategy, check_agreement, choose_strategy
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, HalfstepError
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.ema import EMA
from halfstep.precision.masters.local_part import reshard_
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import Auto
from halfstep.precision.step import Precision
from halfstep.torch_compat import require_torch
from halfstep.trainer.checkpoint.index import Piece, piece_of
from halfstep.trainer.checkpoint.store import Checkpoint
from halfstep.trainer.checkpoint.tensors import (
    AVERAGE,
    BUFFER,
    by_kind,
    convert_optimizer_tensors,
    optimizer_tensors,
    set_optimizer_state,
)
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import ClassifyConfig, LMConfig, TrainConfig
from halfstep.trainer.environment import choose_device, policy_on
from halfstep.trainer.estimate import require_memory
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.memory import count_peak_from_here
from halfstep.trainer.step import Batch, LossSum
from halfstep.trainer.tasks.by_name import part
from halfstep.trainer.tasks.task import Progress, Task, dropout_seed, facts, micro_batches

Opens = Callable[[Any, World, Progress, Layout], Task]
_TASKS: Mapping[type[BaseConfig], str] = {
    TrainConfig: "trainer.tasks.text:TextTask",
    ClassifyConfig: "trainer.tasks.classify:ClassifyTask",
    LMConfig: "trainer.tasks.lm:LMTask",
}


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    score: float
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """The trainer's own part of a checkpoint's state."""

    step: int
    tokens: int
    precision: dict[str, Any]
    """Argument of :meth:`Precision.load_state_dict`, which checks it."""
    best: Best | None
    made_with: dict[str, str]
    """Names and hashes of the data, tokenizer and models that the run read."""
    ema_updates: int
    """Number of updates of the weights' moving average; 0 where there is none."""


def read_progress(state: Mapping[str, Any], where: Path) -> SavedProgress:
    """Read the trainer's part of a checkpoint's state.

    The checkpoint's hashes have shown that it is as it was written; what is checked here is that
    the trainer wrote it.

    Raises:
        CheckpointError: If a value is missing or of another kind.
    """
    try:
        best = None
        if "best" in state:
            found = dict(state["best"]["evaluation"])
            rows = tuple(tuple(map(operator.index, row)) for row in found.get("confusion", ()))
            best = Best(
                operator.index(state["best"]["step"]),
                float(state["best"]["score"]),
                Evaluation(**{**found, "confusion": rows}),
            )
        return SavedProgress(
            operator.index(state["step"]),
            operator.index(state["tokens"]),
            dict(state["precision"]),
            best,
            dict(state["made_with"]),
            operator.index(state.get("ema_updates", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: its state is damaged or foreign ({error!r:.80}). Remove it to go on from "
            "the one before"
        ) from error


@dataclass(slots=True)
class Session:
    """A run in memory: task, optimizer and precision, and how far it has come."""

    config: BaseConfig
    world: World
    device: torch.device
    task: Task
    strategy: Strategy
    precision: Precision
    loss_sum: LossSum
    """The model's loss, compiled where asked."""
    pieces: dict[str, Piece]
    """What this rank holds of every parameter that is trained."""
    memory: Memory
    """What a step holds on this rank, as estimated before the first."""
    ema: EMA | None = None
    """Moving average of the weights, if the run keeps one; it is what is evaluated and exported."""
    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Tokens trained on, without padding."""
    best: Best | None = None
    auto: str = ""
    """Why ``auto`` took the policy; empty if the configuration names one."""
    stop_asked: bool = False
    """Whether a callback on this rank wants the run to end."""

    @property
    def applied(self) -> int:
        """Steps that updated the weights."""
        return self.step - self.precision.skipped_total

    def micro_batches(self) -> tuple[list[Batch], list[int]]:
        """Return this rank's micro-batches of the next step, and a dropout seed for each.

        Both depend only on the run's seed, the step and which rows this rank has.
        """
        run, strategy = self.config.run, self.strategy
        rows = micro_batches(
            self.task.batch_size(self.step),
            strategy.batch_rank,
            strategy.layout.batch_ranks,
            run.grad_accum,
        )
        seeds = [dropout_seed(run.seed, self.step, part.start) for part in rows]
        return [self.task.batch(self.step, part) for part in rows], seeds

    def evaluate(self) -> Evaluation:
        """Evaluate the task in the training precision, on averaged weights if the run has them."""
        model = self.task.model
        self._share_buffers()
        judge = Judge(
            self.loss_sum,
            self.precision.autocast,
            self.device,
            self.strategy.batch_rank,
            self.strategy.layout.batch_ranks,
            self.strategy.sum,
        )
        averaged = nullcontext() if self.ema is None else self.ema.applied_to(model)
        model.eval()
        try:
            with averaged:
                return self.task.evaluate(judge)
        finally:
            reshard_(model)
            model.train()

    def note(self, evaluation: Evaluation) -> bool:
        """Remember an evaluation of this step; return whether it is the best so far."""
        score = -math.inf if math.isnan(evaluation.score) else evaluation.score
        if self.best is not None and score <= self.best.score:
            return False
        self.best = Best(self.step, score, evaluation)
        return True

    def checkpoint(self) -> Checkpoint:
        """Collect all that :meth:`restore` needs to go on bit for bit; all ranks call it."""
        self._share_buffers()
        precision = self.precision.state_dict()
        del precision["masters"]  # they are the weights below
        state: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            "precision": precision,
            "config": config_to_table(self.config),
            "made_with": dict(self.task.identity),
            "torch": torch.__version__,
        }
        if self.best is not None:
            state["best"] = dataclasses.asdict(self.best)
        names = {parameter: name for name, parameter in self.precision.named_parameters().items()}
        (used,) = self.precision.optimizers
        with self.precision.masters.installed():
            optimizer = optimizer_tensors(used, names)
        if self.ema is not None:
            state["ema_updates"] = self.ema.updates
            optimizer |= {f"{n}/{AVERAGE}": t for n, t in self.ema.averages.items()}
        optimizer |= {f"{n}/{BUFFER}": t for n, t in self._buffers().items()}
        weights = {n: w for n, w in self.precision.masters.items() if self.pieces[n].written}
        return Checkpoint(weights, optimizer, state, self.pieces)

    def _buffers(self) -> dict[str, Tensor]:
        """Return the model's persistent buffers, such as running means, by name."""
        named = dict(self.task.model.named_buffers())
        return {n: named[n] for n in self.task.model.state_dict(keep_vars=True) if n in named}

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, as DDP does: each rank's forward moved its own."""
        if self.world.size > 1:
            broadcast_tensors_(self._buffers().values())

    def check_agreement(self, when: str = "") -> None:
        """Raise PrecisionError if ranks do not train the same model; all ranks call it."""
        check_agreement(
            self.precision, self.task.model, self.strategy.layout, step=self.step, when=when
        )

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint, where: Path) -> None:
        """Go on from a checkpoint of a run with the same model and data, in any precision.

        Its tensors are this rank's pieces, whatever layout saved them: they were read for this
        model. With another policy than the checkpoint's, its exact fp32 masters become this
        policy's weights and the moments are converted to this policy's format.

        Raises:
            CheckpointError: If it belongs to another run; nothing is changed then.
        """
        saved = read_progress(checkpoint.state, where)
        for name, value in self.task.identity.items():
            if saved.made_with.get(name) != value:
                raise CheckpointError(
                    f"{where}: made with another {name}, or it has changed since; resume with the "
                    "same files, from the same directory if their paths are relative, and the same "
                    "options for them"
                )
        names = {parameter: name for name, parameter in self.precision.named_parameters().items()}
        moments, averages, buffers = by_kind(checkpoint.optimizer)
        self._require_averages(averages, where)
        (used,) = self.precision.optimizers
        with self.precision.masters.installed():
            states = convert_optimizer_tensors(used, names, moments)
        try:
            self.precision.load_state_dict(
                {**saved.precision, "masters": {}}, weights=checkpoint.weights
            )
        except HalfstepError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where}: the precision state in it is damaged ({error!r:.80}). Remove it to "
                "go on from the one before"
            ) from error
        with self.precision.masters.installed():  # anew: loading has put the parameters back
            set_optimizer_state(used, states)
        if self.ema is not None:
            self.ema.load_state_dict({"updates": saved.ema_updates, "averages": averages})
        for name, buffer in self._buffers().items():
            buffer.copy_(buffers[name])
        self.step, self.tokens, self.best = saved.step, saved.tokens, saved.best

    def _require_averages(self, averages: Mapping[str, Tensor], where: Path) -> None:
        wanted = {} if self.ema is None else self.ema.averages
        if {n: t.shape for n, t in averages.items()} != {n: t.shape for n, t in wanted.items()}:
            raise CheckpointError(
                f"{where}: it has averages of {len(averages)} weights, the run keeps {len(wanted)} "
                "(run.ema_decay): resume with the run's own configuration"
            )


def open_session(
    config: BaseConfig,
    progress: Progress,
    *,
    world: World = World(),  # noqa: B008  (frozen)
    opens: Opens | None = None,
) -> Session:
    """Prepare data and build the model, refusing whatever cannot be run; all ranks call it.

    Args:
        config: That of a new run, or the resolved one of a run to resume.
        progress: Called while data is prepared.
        world: The process group of the ranks, or a world of one.
        opens: Makes the task; None: the one that the configuration names.

    Raises:
        HalfstepError: For data, configuration, precision, layout or model folder that cannot be
            used. No run folder exists yet.
    """
    require_torch()
    run, device = config.run, _device(config, world)
    if run.threads:
        torch.set_num_threads(run.threads)
    auto = choose(device).reason if isinstance(config.precision, Auto) else ""
    policy = policy_on(config.precision, device)
    config = dataclasses.replace(config, precision=policy)
    require_support(policy, device)
    layout = Layout.choose(run.parallel, world.size)
    world.require_same(facts(config))
    strategy = choose_strategy(layout, policy, device, compiled=run.compile)
    _require_rows(run.batch_size, config, layout)
    task = (opens or part(_TASKS[type(config)]))(config, world, progress, layout)
    count_peak_from_here()
    _require_rows(task.smallest_batch, task.config, layout)
    memory = require_memory(task, device, layout)
    model = task.model.to(device)
    strategy.place_(model, task.plan(layout))
    ema, precision = _precision(task, policy, strategy, world)
    loss_sum: LossSum = torch.compile(task.loss_sum) if run.compile else task.loss_sum
    trained = precision.named_parameters()
    pieces = {n: piece_of(p, rank=world.rank) for n, p in model.named_parameters() if n in trained}
    model.train()
    return Session(
        config=task.config, world=world, device=device, task=task, strategy=strategy,
        precision=precision, loss_sum=loss_sum, pieces=pieces, memory=memory, ema=ema, auto=auto,
    )  # fmt: skip


def _device(config: BaseConfig, world: World) -> torch.device:
    named = config.run.device
    if world.size > 1 and named.startswith("cuda:"):
        raise ConfigError(
            f"run.device={named} would put all {world.size} ranks on one GPU; use --device "
            "cuda, which gives each its own"
        )
    return choose_device(named, world.local_rank)


def _precision(
    task: Task, policy: PrecisionPolicy, strategy: Strategy, world: World
) -> tuple[EMA | None, Precision]:
    """Make the optimizer, the moving average and the precision of a model that is in its place."""
    run = task.config.run
    optimizer: Optimizer = task.optimizer(policy)
    if world.size > 1 and isinstance(optimizer, LowPrecisionOptimizer):
        # Ranks may hold parts of one tensor, and a checkpoint stores each tensor in one format.
        optimizer.agree_on_fallback = lambda falls: [world.largest(fall) > 0 for fall in falls]
    ema = EMA(task.model, run.ema_decay) if run.ema_decay else None
    precision = Precision(
        policy,
        task.model,
        optimizer,
        on_nonfinite=run.on_nonfinite,
        on_spike=run.on_spike,
        ema=ema,
        ranks=strategy.ranks,
    )
    strategy.attach_(precision)
    return ema, precision


def _require_rows(rows: int, config: BaseConfig, layout: Layout) -> None:
    """Refuse batches with fewer rows than there are micro-batches over all ranks."""
    least = layout.batch_ranks * config.run.grad_accum
    if rows < least:
        few = "" if rows == config.run.batch_size else f" (batches of {rows} with so little data)"
        raise ConfigError(
            f"run.batch_size={config.run.batch_size}{few} is too small for {layout.batch_ranks} "
            f"ranks with different data and run.grad_accum={config.run.grad_accum} micro-batches "
            f"each; allowed: {least} or more"
        )
