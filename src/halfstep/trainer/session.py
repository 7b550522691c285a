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
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.diagnostics.memory.table import Memory
from halfstep.distributed.consistency import check_agreement
from halfstep.distributed.data.reducer import broadcast_tensors_
from halfstep.distributed.layout import Layout
from halfstep.distributed.select import choose_strategy
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, HalfstepError
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.muon import Muon
from halfstep.optim.state import CODES, REMAINDER, in_dtype
from halfstep.precision.after_step import EMA
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.masters.local_part import reshard_
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.spelling import Auto
from halfstep.precision.step import Precision
from halfstep.torch_compat import require_torch
from halfstep.trainer.checkpoint.pieces import Piece, piece_of
from halfstep.trainer.checkpoint.store import Checkpoint
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import ClassifyConfig, LMConfig, TrainConfig
from halfstep.trainer.environment import choose_device, policy_on
from halfstep.trainer.estimate import require_memory
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.memory import count_peak_from_here
from halfstep.trainer.step import Batch, LossSum
from halfstep.trainer.tasks.classify import ClassifyTask
from halfstep.trainer.tasks.lm import LMTask
from halfstep.trainer.tasks.task import Exported, Progress, Task, dropout_seed, facts, micro_batches
from halfstep.trainer.tasks.text import TextTask

Opens = Callable[[Any, torch.device, Layout, World, Progress, bool], Task]


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    score: float
    evaluation: Evaluation
    evaluations_since: int = 0
    """Number of evaluations since then, none of them better."""


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
        best = dict(state["best"]) if "best" in state else None
        if best is not None:
            found = dict(best["evaluation"])
            rows = tuple(tuple(map(operator.index, row)) for row in found.get("confusion", ()))
            best["evaluation"] = Evaluation(**{**found, "confusion": rows})
            best["step"], best["score"] = operator.index(best["step"]), float(best["score"])
        return SavedProgress(
            operator.index(state["step"]),
            operator.index(state["tokens"]),
            dict(state["precision"]),
            None if best is None else Best(**best),
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
        best = self.best
        score = -math.inf if math.isnan(evaluation.score) else evaluation.score
        if best is None or score > best.score:
            self.best = Best(self.step, score, evaluation)
            return True
        since = best.evaluations_since + 1
        self.best = dataclasses.replace(best, evaluations_since=since)
        return False

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
        moments, averages, buffers = _by_kind(checkpoint.optimizer)
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
    resuming: bool = False,
    world: World = World.alone(),  # noqa: B008  (frozen)
    opens: Opens | None = None,
) -> Session:
    """Prepare data and build the model, refusing whatever cannot be run; all ranks call it.

    Args:
        config: That of a new run, or the resolved one of a run to resume.
        progress: Called while data is prepared.
        resuming: Weights will be restored, so ``run.init_from`` is not read again.
        world: The process group of the ranks, or a world of one.
        opens: Makes the task; None: the one that the configuration names.

    Raises:
        HalfstepError: For data, configuration, precision, layout or model folder that cannot be
            used. No run folder exists yet.
    """
    require_torch(*(["gradients over several machines"] if world.size > 1 else []))
    run = config.run
    device = choose_device(run.device, world.local_rank)
    if world.size > 1 and run.device.startswith("cuda:"):
        raise ConfigError(
            f"run.device={run.device} would put all {world.size} ranks on one GPU; use --device "
            "cuda, which gives each its own"
        )
    if run.threads:
        torch.set_num_threads(run.threads)
    policy = policy_on(config.precision, device)
    auto = choose(device).reason if isinstance(config.precision, Auto) else ""
    config = dataclasses.replace(config, precision=policy)
    require_support(policy, device)
    layout = Layout.choose(run.parallel, world.size)
    world.require_same(facts(config))
    strategy = choose_strategy(
        layout, policy, device, compiled=run.compile, sequence_parallel=run.sequence_parallel
    )
    _require_rows(run.batch_size, config, layout)
    task = (opens or _open_task)(config, device, layout, world, progress, resuming)
    count_peak_from_here()
    config = task.config
    _require_rows(task.smallest_batch, config, layout)
    memory = require_memory(task, device, layout)
    model = task.model.to(device)
    strategy.place_(model, task.plan(layout))
    optimizer = task.optimizer(policy)
    if world.size > 1 and isinstance(optimizer, LowPrecisionOptimizer):
        # Ranks may hold parts of one tensor, and a checkpoint stores each tensor in one format.
        optimizer.agree_on_fallback = lambda falls: [world.largest(fall) > 0 for fall in falls]
        if isinstance(optimizer, Muon):
            optimizer.ranks = dist.group.WORLD
    ema = EMA(model, run.ema_decay, seed=run.seed) if run.ema_decay else None
    precision = Precision(
        policy,
        model,
        optimizer,
        on_nonfinite=run.on_nonfinite,
        on_spike=run.on_spike,
        ema=ema,
        ranks=strategy.ranks,
    )
    strategy.attach_(precision)
    loss_sum: LossSum = torch.compile(task.loss_sum) if run.compile else task.loss_sum
    trained = precision.named_parameters()
    pieces = {n: piece_of(p, rank=world.rank) for n, p in model.named_parameters() if n in trained}
    model.train()
    return Session(
        config, world, device, task, strategy, precision, loss_sum, pieces, memory, ema, auto=auto
    )


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


def _open_task(
    config: BaseConfig,
    device: torch.device,
    layout: Layout,
    world: World,
    progress: Progress,
    resuming: bool,
) -> Task:
    """Prepare the data and build the model of a configuration's task; all ranks call it."""
    match config:
        case TrainConfig():
            return TextTask(config, layout, world, progress, resuming)
        case ClassifyConfig():
            return ClassifyTask(config, world, progress)
        case LMConfig():
            return LMTask(config, world, progress)
        case _:
            raise AssertionError(type(config))


# Optimizer state to named tensors and back, converted to the dtypes of another policy if needed.


AVERAGE, BUFFER = "ema", "buffer"
"""The KEY in ``NAME/KEY`` of tensors saved beside the optimizer's: averaged weights, buffers."""
EXPORTED = (AVERAGE, BUFFER)
"""What :func:`exported` needs of a checkpoint, besides its weights."""


def _by_kind(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Split a checkpoint's tensors into moments by path, and averages and buffers by name."""
    moments: dict[str, Tensor] = {}
    others: dict[str, dict[str, Tensor]] = {AVERAGE: {}, BUFFER: {}}
    for path, tensor in tensors.items():
        name, _, kind = path.rpartition("/")
        if kind in others:
            others[kind][name] = tensor
        else:
            moments[path] = tensor
    return moments, others[AVERAGE], others[BUFFER]


def exported(checkpoint: Checkpoint) -> Exported:
    """Return a checkpoint's weights for export: their averages, where the run kept some."""
    _, averages, buffers = _by_kind(checkpoint.optimizer)
    weights = {name: averages.get(name, w).float() for name, w in checkpoint.weights.items()}
    return Exported(weights, buffers)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, Tensor]:
    """Return the optimizer's state as ``"NAME/KEY"`` to tensor, without the weights' remainders.

    8-bit codes have the moment's own name: in a checkpoint's file their dtype tells them apart.
    """
    return {
        f"{names[parameter]}/{key.removesuffix(CODES)}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if key != REMAINDER
    }


def convert_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: dict[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    """Convert the state that :func:`optimizer_tensors` saved to this optimizer's formats.

    Each tensor moves to its parameter's device, and only moments in another format are converted;
    ``Optimizer.load_state_dict`` would cast all of them to the parameter's dtype and lose bits.

    Raises:
        PrecisionError: If a moment is missing or of another shape.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    saved: dict[nn.Parameter, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = parameters[name]
        # A fused AdamW keeps its step counter beside the parameter, as it keeps the moments.
        saved.setdefault(parameter, {})[key] = tensor.to(parameter.device)
    if isinstance(optimizer, LowPrecisionOptimizer):
        return {
            parameter: optimizer.convert(parameter, state) for parameter, state in saved.items()
        }
    return {parameter: in_dtype(state, parameter.dtype) for parameter, state in saved.items()}


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, states: Mapping[Tensor, dict[str, Any]]
) -> None:
    """Set converted states, but keep the current remainders, which belong to the weights."""
    held = {p: state[REMAINDER] for p, state in optimizer.state.items() if REMAINDER in state}
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for parameter, remainder in held.items():
        optimizer.state[parameter][REMAINDER] = remainder
