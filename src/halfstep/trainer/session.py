"""Everything a run needs, made from its configuration and checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan, Strategy, choose_strategy
from halfstep.distributed.world import World, broadcast_tensors_
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim.state import as_values, in_dtype
from halfstep.precision.casting.autocast import require_support, support
from halfstep.precision.masters.local_part import reshard_
from halfstep.precision.masters.rounding import REMAINDER
from halfstep.precision.masters.stepping import OwnOptimizer
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import LOW, PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer import part
from halfstep.trainer.checkpoint import AVERAGE, BUFFER, Checkpoint, by_kind
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import ClassifyConfig, LMConfig, TrainConfig
from halfstep.trainer.environment import choose_device
from halfstep.trainer.shards import Shard, shard_of
from halfstep.trainer.step import Ahead, Batch, Evaluation, Judge, LossSum, MicroBatches
from halfstep.trainer.tasks.task import Task, dropout_seed, facts, micro_batches

if TYPE_CHECKING:
    from halfstep.precision.ema import EMA

Opens = Callable[[Any, World, Layout], Task]
_TASKS: Mapping[type[BaseConfig], str] = {
    TrainConfig: "trainer.tasks.text:TextTask",
    ClassifyConfig: "trainer.tasks.classify:ClassifyTask",
    LMConfig: "trainer.tasks.lm:LMTask",
}

WORTHWHILE = 3000
"""Steps from which ``auto`` compiles on CUDA.

A GPT-2 of 124 M parameters took over 28 seconds to compile on an H200, 4 from torch's cache, and a
compiled step saved 11 of 45 ms (benchmarks/results/h100-2026-11-27.jsonl).
"""


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    evaluation: Evaluation


def _rank(evaluation: Evaluation) -> tuple[float, float]:
    """Rank by score, then by loss: equal accuracies are common."""
    score, loss = evaluation.score, evaluation.loss
    return (-math.inf if math.isnan(score) else score, -math.inf if math.isnan(loss) else -loss)


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
    shards: dict[str, Shard]
    """What this rank holds of every parameter that is trained."""
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
    ahead: Ahead = field(init=False)
    """The micro-batches of steps, made a step ahead where that helps."""

    followed: bool = False
    """Whether callbacks see each step, so that the outcome of one may not come after the next."""

    def __post_init__(self) -> None:
        self.ahead = Ahead(self.micro_batches, self.device)

    @property
    def applied(self) -> int:
        """Steps that updated the weights; without a loss scale a step that does not is an error."""
        precision = self.precision
        scaled = precision.policy.loss_scale.kind != "none"
        progress = precision.progress if scaled else precision.outcome.progress
        return self.step - progress.skipped_total

    def micro_batches(self, step: int) -> MicroBatches:
        """Return this rank's micro-batches of a step, on the host.

        They depend only on the run's seed, the step and which rows this rank has.
        """
        run, strategy, task = self.config.run, self.strategy, self.task
        rows = micro_batches(
            task.batch_size(step), strategy.batch_rank, strategy.layout.batch_ranks, run.grad_accum
        )
        batches = [task.batch(step, part) for part in rows]
        seeds = [dropout_seed(run.seed, step, part.start) for part in rows]
        return MicroBatches(batches, seeds, sum(map(task.targets, batches)))

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
        if self.best is not None and _rank(evaluation) <= _rank(self.best.evaluation):
            return False
        self.best = Best(self.step, evaluation)
        return True

    def checkpoint(self) -> Checkpoint:
        """Collect all that :meth:`restore` needs to go on bit for bit; all ranks call it."""
        self._share_buffers()
        precision = self.precision.state_dict()
        self.precision.masters.take_written_()
        masters = dict(self.precision.masters.items())
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
        names: dict[Tensor, str] = {p: n for n, p in self.precision.named_parameters().items()}
        (used,) = self.precision.optimizers
        optimizer: dict[str, Tensor] = {}
        with self.precision.masters.installed():
            for parameter, held in used.state.items():
                # 8-bit moments are saved on the host as bf16, which holds their values exactly:
                # their codes count from the largest number of blocks in a rank's memory, so that
                # they mean nothing in another layout. Remainders are in the masters.
                for key, value in as_values(held).items():
                    if key != REMAINDER:
                        tensor = value if key in held else value.cpu()
                        optimizer[f"{names[parameter]}/{key}"] = tensor
        if self.ema is not None:
            state["ema_updates"] = self.ema.updates
            optimizer |= {f"{n}/{AVERAGE}": t for n, t in self.ema.averages.items()}
        optimizer |= {f"{n}/{BUFFER}": t for n, t in self._buffers().items()}
        weights = {name: w for name, w in masters.items() if self.shards[name].written}
        return Checkpoint(weights, optimizer, state, self.shards)

    def _buffers(self) -> dict[str, Tensor]:
        """Return the model's persistent buffers, such as running means, by name."""
        named = dict(self.task.model.named_buffers())
        return {n: named[n] for n in self.task.model.state_dict(keep_vars=True) if n in named}

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, as DDP does: each rank's forward moved its own."""
        if self.world.size > 1:
            broadcast_tensors_(self._buffers().values())

    def report_best(self, folder: Path) -> None:
        """Write the task's report of the best evaluation so far into the run folder; on rank 0."""
        if self.best is not None:
            self.task.improved(folder, self.best.step, self.best.evaluation)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint, where: Path) -> None:
        """Go on from a checkpoint of a run with the same model and data, in any precision.

        Its tensors are this rank's shards, whatever layout saved them: they were read for this
        model. With another policy than the checkpoint's, its exact fp32 masters become this
        policy's weights and the moments are converted to this policy's format.

        Raises:
            CheckpointError: If it belongs to another run.
        """
        state = checkpoint.state
        for name, value in self.task.identity.items():
            if state["made_with"].get(name) != value:
                raise CheckpointError(
                    f"{where}: made with another {name}, or it has changed since; resume with the "
                    "same files and the same options for them"
                )
        moments, averages, buffers = by_kind(checkpoint.optimizer)
        parameters = self.precision.named_parameters()
        saved: dict[nn.Parameter, dict[str, Tensor]] = {}
        for path, tensor in moments.items():
            name, _, key = path.rpartition("/")
            # a fused AdamW keeps its step counter beside the parameter, as it keeps the moments
            saved.setdefault(parameters[name], {})[key] = tensor.to(parameters[name].device)
        used: Any = self.precision.optimizers[0]
        own = isinstance(used, OwnOptimizer)
        with self.precision.masters.installed():
            # Optimizer.load_state_dict would cast all to the parameter's dtype, and lose bits
            states = {
                p: used.convert(p, held) if own else in_dtype(held, p.dtype)
                for p, held in saved.items()
            }
            used.state.clear()
            used.state.update(states)
        # after the moments: it puts the remainders of 16-bit weights beside them
        self.precision.load_state_dict(state["precision"], weights=checkpoint.weights)
        if self.ema is not None:
            self.ema.load_state_dict({"updates": state["ema_updates"], "averages": averages})
        for name, buffer in self._buffers().items():
            buffer.copy_(buffers[name])
        self.step, self.tokens = state["step"], state["tokens"]
        if best := state.get("best"):
            self.best = Best(best["step"], Evaluation(**best["evaluation"]))


# Making a session.


def open_session(
    config: BaseConfig,
    *,
    world: World = World(),  # noqa: B008  (frozen)
    opens: Opens | None = None,
) -> Session:
    """Prepare data and build the model, refusing whatever cannot be run; all ranks call it.

    ``opens`` makes the task, if it is not the one that the configuration names. No run folder
    exists yet when something is refused.
    """
    run, device = config.run, choose_device(config.run.device, world.local_rank)
    auto = choose(device).reason if isinstance(config.precision, str) else ""
    policy = parse_policy(config.precision, device)
    config = dataclasses.replace(config, precision=policy)
    require_support(policy, device)
    layout = Layout.choose(run.parallel, world.size)
    world.require_same(facts(config))
    strategy = choose_strategy(layout, policy, device)
    task = (opens or part(_TASKS[type(config)]))(config, world, layout)
    least = layout.batch_ranks * task.config.run.grad_accum
    if task.smallest_batch < least:
        raise ConfigError(
            f"batches of {task.smallest_batch} rows are too small for {layout.batch_ranks} ranks "
            f"with different data and run.grad_accum={task.config.run.grad_accum} micro-batches "
            f"each; allowed: {least} or more"
        )
    config = with_choice(task.config, policy, device)
    task.notes += tune_(task.model, policy, device)
    model, plan = task.model, task.plan(layout)
    if layout.shard == 1:  # else FSDP2 takes the device's memory for a block at a time
        model.to(device)
    strategy.place_(model, plan)
    task.laid_out_(device)
    ema, precision = _precision(task, policy, strategy, world)
    loss_sum = compiled_(task, plan, layout) if config.run.compile == "yes" else task.loss_sum
    trained = precision.named_parameters()
    shards = {n: shard_of(p, world.rank) for n, p in model.named_parameters() if n in trained}
    model.train()
    return Session(
        config=config, world=world, device=device, task=task, strategy=strategy,
        precision=precision, loss_sum=loss_sum, shards=shards, ema=ema, auto=auto,
    )  # fmt: skip


def _precision(
    task: Task, policy: PrecisionPolicy, strategy: Strategy, world: World
) -> tuple[EMA | None, Precision]:
    run = task.config.run
    optimizer: Any = task.optimizer(policy)
    own = isinstance(optimizer, OwnOptimizer)
    if own and world.size > 1:
        # Ranks may hold parts of one tensor, and a checkpoint stores each tensor in one format.
        optimizer.agree_on_fallback = lambda falls: [world.largest(fall) > 0 for fall in falls]
    ema = part("precision.ema:EMA")(task.model, run.ema_decay) if run.ema_decay else None
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


# Whether a run compiles its model, by ``torch.compile``, and how; what else CUDA is told.


def with_choice(config: BaseConfig, policy: PrecisionPolicy, device: torch.device) -> BaseConfig:
    """Decide what ``compile = "auto"`` means here, and say ``yes`` or ``no`` in its place.

    On a CPU it means no. A GPT of 14 M parameters took 55 s to compile there; in ``bf16-mixed`` its
    step by halfstep's own kernels takes 0.65 of the time of the compiled one, in ``fp32`` 1.02
    (docs/training.md).
    """
    run, native = config.run, support(policy, device).status == "native"
    wins = device.type == "cuda" and native and has_triton()
    if run.compile == "auto":
        run = dataclasses.replace(
            run, compile="yes" if wins and run.max_steps >= WORTHWHILE else "no"
        )
    return dataclasses.replace(config, run=run)


def compiled_(task: Task, plan: ParallelPlan, layout: Layout) -> LossSum:
    """Return the task's loss, compiled; where ranks hold parts of the weights, by block.

    The hooks that gather a block's weights run around its graph, not in it; sums over tensor ranks
    are in it. Where batches differ in their lengths, one graph is for all of them, and is not
    compiled again for the next length.
    """
    if layout.shard * layout.tensor > 1 or task.by_block:
        for block in plan.blocks:
            block.forward = torch.compile(block.forward)
        return task.loss_sum
    compiled: LossSum = torch.compile(task.loss_sum)
    if not task.lengths_vary:
        return compiled

    def loss_sum(batch: Batch) -> tuple[Tensor, Tensor]:
        for tensor in tree_leaves(batch):
            torch._dynamo.maybe_mark_dynamic(tensor, [*range(tensor.dim())])
        return compiled(batch)

    return loss_sum


def tune_(model: nn.Module, policy: PrecisionPolicy, device: torch.device) -> list[str]:
    """Lay convolutions in 16 bits out as CUDA runs them fastest, and say what holds on CUDA."""
    notes = []
    if device.type == "cuda" and policy.compute_dtype == torch.float32:
        off = "off, also in convolutions, for which torch's default is on (--precision tf32)"
        notes.append(f"TF32 is {'on' if policy.tf32 else off}")
    images = any(isinstance(m, nn.Conv2d) for m in model.modules())
    if device.type == "cuda" and policy.compute_dtype in LOW and images:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        notes.append("images are laid out as channels_last")
    return notes
