"""Everything a run needs, made from its configuration and checked before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep.checkpoint.pieces import Piece, piece_of
from halfstep.checkpoint.store import Checkpoint
from halfstep.data.batches import IGNORED, batch, validation_batches
from halfstep.data.prepare import PreparedData, prepare
from halfstep.data.tokenizer import Tokenizer
from halfstep.distributed.agreement import check_agreement
from halfstep.distributed.layout import Layout
from halfstep.distributed.plan import plan_of
from halfstep.distributed.select import choose_strategy
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep.models.gpt import GPT
from halfstep.models.hf import load_gpt2
from halfstep.precision.autocast import require_support
from halfstep.precision.local import reshard_
from halfstep.precision.parse import parse_policy
from halfstep.precision.step import Precision
from halfstep.training.config import TrainConfig, config_to_table
from halfstep.training.environment import choose_device
from halfstep.training.evaluate import Evaluation, evaluate, tokens_per_byte
from halfstep.training.optimizer import make_optimizer
from halfstep.training.optimizer_state import (
    convert_optimizer_tensors,
    optimizer_tensors,
    set_optimizer_state,
)
from halfstep.training.shares import dropout_seed, facts, share_of
from halfstep.training.step import Batch, LossSum

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Session:
    """A run in memory: model, optimizer and precision, data, and how far it has come."""

    config: TrainConfig
    world: World
    device: torch.device
    data: PreparedData
    model: GPT
    strategy: Strategy
    precision: Precision
    loss_sum: LossSum
    """The model's loss, compiled where asked."""
    pieces: dict[str, Piece]
    """What this rank holds of every parameter."""
    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Target tokens trained on."""

    @property
    def applied(self) -> int:
        """Steps that updated the weights."""
        return self.step - self.precision.skipped_total

    @property
    def share(self) -> range:
        """This rank's sequences of a step's batch; shares differ by one where ranks do not fit."""
        size, ranks = self.config.run.batch_size, self.strategy.layout.batch_ranks
        return share_of(size, self.strategy.batch_rank, ranks)

    def micro_batches(self) -> list[Batch]:
        """This rank's part of the next step's batch, split for accumulation.

        A pure function of seed, step and share; so is the random state it leaves for dropout.
        """
        run = self.config.run
        share = self.share
        parts = [share_of(len(share), i, run.grad_accum) for i in range(run.grad_accum)]
        torch.manual_seed(dropout_seed(run.seed, self.step, self.strategy.batch_rank))
        return [
            batch(
                self.data.train,
                seed=run.seed,
                step=self.step,
                sequences=share[part.start : part.stop],
                block_size=self.config.block_size,
            )
            for part in parts
        ]

    def validation_batches(self) -> Iterable[Batch]:
        """This rank's rows of what one evaluation measures: always the same windows."""
        run = self.config.run
        layout = self.strategy.layout
        whole = validation_batches(
            self.data.validation,
            block_size=self.config.block_size,
            batch_size=run.batch_size // run.grad_accum,
            max_batches=run.eval_batches * run.grad_accum or None,
        )
        for tokens_BT, targets_BT in whole:
            rows = share_of(len(tokens_BT), self.strategy.batch_rank, layout.batch_ranks)
            if rows:
                here = slice(rows.start, rows.stop)
                yield tokens_BT[here], targets_BT[here]
            else:  # all ranks run as often: a row that does not count
                yield tokens_BT[:1], torch.full_like(targets_BT[:1], IGNORED)

    def evaluate(self) -> Evaluation:
        """Validation loss in the training precision."""
        self.model.eval()
        try:
            return evaluate(
                self.loss_sum,
                self.validation_batches(),
                self.precision.autocast,
                self.device,
                tokens_per_byte(self.data.validation),
                self.strategy.sum,
            )
        finally:
            reshard_(self.model)
            self.model.train()

    def _data_hashes(self) -> list[str]:
        return [self.data.train.sha256, self.data.validation.sha256]

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
            "tokenizer": self.data.tokenizer.fingerprint,
            "data": self._data_hashes(),
            "torch": torch.__version__,
        }
        names = {parameter: name for name, parameter in named.items()}
        (used,) = self.precision.optimizers
        optimizer = optimizer_tensors(used, names)
        weights = {n: w for n, w in self.precision.masters.items() if self.pieces[n].written}
        return Checkpoint(weights, optimizer, state, self.pieces)

    def check_agreement(self, when: str = "") -> None:
        """Stop if ranks do not train the same model: :func:`check_agreement`. All ranks."""
        check_agreement(self.precision, self.model, self.strategy.layout, step=self.step, when=when)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint, where: Path) -> None:
        """Go on from a checkpoint of a run with the same model and data, in any precision.

        Its tensors are this rank's pieces, whatever layout saved them. With another policy than the
        checkpoint's, its exact fp32 masters become this policy's weights and the moments are
        converted to this policy's format.

        Raises:
            CheckpointError: If it belongs to another run; nothing is changed then.
        """
        state = checkpoint.state
        if state.get("tokenizer") != self.data.tokenizer.fingerprint:
            raise CheckpointError(
                f"{where}: made with another tokenizer; resume with the same data and --tokenizer"
            )
        if state.get("data") != self._data_hashes():
            raise CheckpointError(
                f"{where}: the training or validation data has changed since; resume with the same "
                "files, from the same directory if --data is relative"
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
        states = convert_optimizer_tensors(used, names, moments)
        saved = {**state["precision"], "masters": {}}
        self.precision.load_state_dict(saved, weights=checkpoint.weights)
        set_optimizer_state(used, states)
        self.step = int(state["step"])
        self.tokens = int(state["tokens"])


def open_session(
    config: TrainConfig,
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
    if run.batch_size < layout.batch_ranks * run.grad_accum:
        raise ConfigError(
            f"run.batch_size={run.batch_size} is too small for {layout.batch_ranks} ranks with "
            f"different data and run.grad_accum={run.grad_accum} micro-batches each; allowed: "
            f"{layout.batch_ranks * run.grad_accum} or more"
        )
    data = world.first_on_machine(lambda: prepare(config.data, progress=progress))
    found = (data.train.sha256, data.validation.sha256, data.tokenizer.fingerprint)
    world.require_same(
        dict(zip(("training data", "validation data", "tokenizer"), found, strict=True))
    )
    model = _make_model(config, data.tokenizer, resuming).to(device)
    config = dataclasses.replace(config, model=model.config)
    if run.block_size > model.config.block_size:
        raise ConfigError(
            f"run.block_size={run.block_size} is over the {model.config.block_size} "
            f"positions of run.init_from={run.init_from}"
        )
    if model.config.n_head % layout.tensor:
        raise ConfigError(
            f"model.n_head={model.config.n_head} attention heads cannot be shared equally by "
            f"tensor={layout.tensor} ranks; choose a tensor size that divides them"
        )
    strategy.place_(model, plan_of(model))
    optimizer = make_optimizer(model, config.optimizer, policy, seed=run.seed)
    precision = Precision(
        policy, model, optimizer, on_nonfinite=run.on_nonfinite, ranks=strategy.ranks
    )
    strategy.attach_(precision)
    loss_sum: LossSum = torch.compile(model.loss_sum) if run.compile else model.loss_sum
    pieces = {n: piece_of(p, rank=world.rank) for n, p in model.named_parameters()}
    session = Session(
        config, world, device, data, model.train(), strategy, precision, loss_sum, pieces
    )
    for part, first in (
        ("training", session.micro_batches),
        ("validation", lambda: next(iter(session.validation_batches()))),
    ):
        try:  # data shorter than a block is refused here, not at the first step
            first()
        except DataError as error:
            raise DataError(f"the {part} data is too short: {error}") from error
    return session


def _make_model(config: TrainConfig, tokenizer: Tokenizer, resuming: bool) -> GPT:
    """A new model with the tokenizer's vocabulary, or a loaded one that must hold it."""
    size = tokenizer.vocab_size
    if config.run.init_from and resuming:
        return GPT(config.model, seed=config.run.seed)
    if config.run.init_from:
        model = load_gpt2(
            Path(config.run.init_from),
            dropout=config.model.dropout,
            activation_checkpointing=config.model.activation_checkpointing,
        )
        if model.config.vocab_size < size:
            raise ConfigError(
                f"run.init_from={config.run.init_from} has a vocabulary of "
                f"{model.config.vocab_size}, data.tokenizer={config.data.tokenizer} has {size}; "
                "use the model's own tokenizer folder"
            )
        return model
    if config.model.vocab_size not in (0, size):
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but data.tokenizer="
            f"{config.data.tokenizer} has {size} ids; leave model.vocab_size at 0 to follow it"
        )
    shape = dataclasses.replace(config.model, vocab_size=size)
    return GPT(shape, seed=config.run.seed)
