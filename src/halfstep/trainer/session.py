"""Everything a run needs, made from its configuration and checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed.consistency import check_agreement
from halfstep.distributed.layout import Layout
from halfstep.distributed.plan import plan_of
from halfstep.distributed.select import choose_strategy
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, HalfstepError
from halfstep.optim.base import LowPrecisionOptimizer
from halfstep.optim.storage.state import CODES, REMAINDER, in_dtype
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.masters.local_part import reshard_
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.torch_version import MACHINES, require_torch
from halfstep.trainer.checkpoint.pieces import Piece, piece_of
from halfstep.trainer.checkpoint.store import Checkpoint
from halfstep.trainer.config.config import TrainConfig, config_to_table
from halfstep.trainer.config.finetune import ClassifyConfig, LMConfig
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.environment import choose_device
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.optimizer import make_optimizer
from halfstep.trainer.run.progress import Best, read_progress
from halfstep.trainer.step import Batch, LossSum
from halfstep.trainer.tasks.classify import ClassifyTask
from halfstep.trainer.tasks.lm import LMTask
from halfstep.trainer.tasks.task import Progress, Task, dropout_seed, facts, share_of
from halfstep.trainer.tasks.text import TextTask


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
    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Tokens trained on, without padding."""
    best: Best | None = None

    @property
    def applied(self) -> int:
        """Steps that updated the weights."""
        return self.step - self.precision.skipped_total

    def micro_batches(self) -> tuple[list[Batch], list[int]]:
        """This rank's part of the next step's batch, split for accumulation; dropout's seeds.

        A pure function of seed, step and share.
        """
        run, strategy = self.config.run, self.strategy
        share = share_of(
            self.task.batch_size(self.step), strategy.batch_rank, strategy.layout.batch_ranks
        )
        parts = [share_of(len(share), i, run.grad_accum) for i in range(run.grad_accum)]
        rows = [share[part.start : part.stop] for part in parts]
        seeds = [dropout_seed(run.seed, self.step, part.start) for part in rows]
        return [self.task.batch(self.step, part) for part in rows], seeds

    def evaluate(self) -> Evaluation:
        """The task's measure in the training precision."""
        model = self.task.model
        judge = Judge(
            self.loss_sum,
            self.precision.autocast,
            self.device,
            self.strategy.batch_rank,
            self.strategy.layout.batch_ranks,
            self.strategy.sum,
        )
        model.eval()
        try:
            return self.task.evaluate(judge)
        finally:
            reshard_(model)
            model.train()

    def note(self, evaluation: Evaluation) -> bool:
        """Remember an evaluation of this step; whether it is the best so far."""
        best = self.best
        score = -math.inf if math.isnan(evaluation.score) else evaluation.score
        if best is None or score > best.score:
            self.best = Best(self.step, score, evaluation)
            return True
        since = best.evaluations_since + 1
        self.best = dataclasses.replace(best, evaluations_since=since)
        return False

    def checkpoint(self) -> Checkpoint:
        """All that :meth:`restore` needs to go on bit for bit."""
        named = self.precision.named_parameters()
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
        names = {parameter: name for name, parameter in named.items()}
        (used,) = self.precision.optimizers
        with self.precision.masters.installed():
            optimizer = optimizer_tensors(used, names)
        weights = {n: w for n, w in self.precision.masters.items() if self.pieces[n].written}
        return Checkpoint(weights, optimizer, state, self.pieces)

    def check_agreement(self, when: str = "") -> None:
        """Stop if ranks do not train the same model: :func:`check_agreement`. All ranks."""
        check_agreement(
            self.precision, self.task.model, self.strategy.layout, step=self.step, when=when
        )

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint, where: Path) -> None:
        """Go on from a checkpoint of a run with the same model and data, in any precision.

        Its tensors are this rank's pieces, whatever layout saved them. With another policy than the
        checkpoint's, its exact fp32 masters become this policy's weights and the moments are
        converted to this policy's format.

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
        named = self.precision.named_parameters()
        shapes = {name: tensor.shape for name, tensor in named.items()}
        if {name: tensor.shape for name, tensor in checkpoint.weights.items()} != shapes:
            odd = sorted(set(shapes) ^ set(checkpoint.weights)) or ["shapes differ"]
            raise CheckpointError(f"{where}: made by another model: {', '.join(odd[:5])}")
        names = {parameter: name for name, parameter in named.items()}
        # the first format kept a random state, which now follows from seed and step
        moments = {k: v for k, v in checkpoint.optimizer.items() if not k.startswith("rng/")}
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
            set_optimizer_state(used, states)
        self.step, self.tokens, self.best = saved.step, saved.tokens, saved.best


def open_session(
    config: BaseConfig,
    progress: Progress,
    *,
    resuming: bool = False,
    world: World = World.alone(),  # noqa: B008  (frozen)
) -> Session:
    """Prepare data and build the model; refuse here whatever cannot be run. All ranks together.

    Args:
        config: Of a new run, or the resolved one of a run to go on with.
        progress: Called while data is prepared.
        resuming: Weights will be restored, so ``run.init_from`` is not read again.
        world: The ranks.

    Raises:
        HalfstepError: For data, configuration, precision, layout or model folder that cannot be
            used. No run folder exists yet.
    """
    require_torch(*([MACHINES] if world.size > 1 else []))
    run = config.run
    device = choose_device(run.device, world.local_rank)
    if world.size > 1 and run.device.startswith("cuda:"):
        raise ConfigError(
            f"run.device={run.device} would put all {world.size} ranks on one GPU; use --device "
            "cuda, which gives each its own"
        )
    policy = parse_policy(config.precision)
    require_support(policy, device)
    layout = Layout.choose(run.parallel, world.size)
    world.require_same(facts(config))
    strategy = choose_strategy(
        layout, policy, device, compiled=run.compile, sequence_parallel=run.sequence_parallel
    )
    _require_rows(run.batch_size, config, layout)
    task = open_task(config, layout, world, progress, resuming)
    config, model = task.config, task.model.to(device)
    _require_rows(task.smallest_batch, config, layout)
    strategy.place_(model, plan_of(model))
    optimizer = make_optimizer(model, config.optimizer, policy, seed=run.seed)
    if world.size > 1 and isinstance(optimizer, LowPrecisionOptimizer):
        # Ranks may hold parts of one tensor, and a checkpoint keeps it in one format.
        optimizer.agree_on_fallback = lambda falls: [world.largest(fall) > 0 for fall in falls]
    precision = Precision(
        policy, model, optimizer, on_nonfinite=run.on_nonfinite, ranks=strategy.ranks
    )
    strategy.attach_(precision)
    loss_sum: LossSum = torch.compile(model.loss_sum) if run.compile else model.loss_sum
    trained = precision.named_parameters()
    pieces = {n: piece_of(p, rank=world.rank) for n, p in model.named_parameters() if n in trained}
    model.train()
    return Session(config, world, device, task, strategy, precision, loss_sum, pieces)


def _require_rows(rows: int, config: BaseConfig, layout: Layout) -> None:
    """Refuse batches of fewer rows than micro-batches over all ranks."""
    least = layout.batch_ranks * config.run.grad_accum
    if rows < least:
        few = "" if rows == config.run.batch_size else f" (batches of {rows} with so little data)"
        raise ConfigError(
            f"run.batch_size={config.run.batch_size}{few} is too small for {layout.batch_ranks} "
            f"ranks with different data and run.grad_accum={config.run.grad_accum} micro-batches "
            f"each; allowed: {least} or more"
        )


# From a configuration to its task.


def open_task(
    config: BaseConfig, layout: Layout, world: World, progress: Progress, resuming: bool
) -> Task:
    """Prepare the data and build the model of a configuration's task; all ranks together.

    Args:
        config: Of the run.
        layout: How the ranks will share the work.
        world: The ranks.
        progress: Called while data is prepared.
        resuming: Weights will be restored, so that none need be loaded where they are not frozen.

    Raises:
        HalfstepError: For data, a model or a layout that cannot be used.
    """
    match config:
        case TrainConfig():
            return TextTask(config, layout, world, progress, resuming)
        case ClassifyConfig():
            return ClassifyTask(config, world, progress)
        case LMConfig():
            return LMTask(config, world, progress)
        case _:
            raise AssertionError(type(config))


# An optimizer's state as tensors by name, and back, in the formats of another policy.


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, Tensor]:
    """The optimizer's state as ``"NAME/KEY"`` to tensor, without what the weights hold already.

    8-bit codes stand under the moment's own name: a checkpoint's file tells them by their dtype.
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
    """The state that :func:`optimizer_tensors` saved, in this optimizer's formats.

    Each tensor comes to its parameter's device, and moments of another format are converted;
    ``Optimizer.load_state_dict`` would cast all of them to the parameter's dtype, this keeps bits.

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
    """Take converted states; remainders, which belong to the weights, stay."""
    held = {p: state[REMAINDER] for p, state in optimizer.state.items() if REMAINDER in state}
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for parameter, remainder in held.items():
        optimizer.state[parameter][REMAINDER] = remainder
