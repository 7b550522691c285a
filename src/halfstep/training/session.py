"""Everything a run needs, made from its configuration and checked before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep.data.batches import batch, validation_batches
from halfstep.data.prepare import PreparedData, prepare
from halfstep.data.tokenizer import Tokenizer
from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep.models.gpt import GPT
from halfstep.models.hf import load_gpt2
from halfstep.precision.autocast import require_support
from halfstep.precision.parse import parse_policy
from halfstep.precision.step import Precision
from halfstep.training.checkpoint import (
    Checkpoint,
    convert_optimizer_tensors,
    load_rng_tensors,
    optimizer_tensors,
    rng_tensors,
    set_optimizer_state,
)
from halfstep.training.config import TrainConfig, config_to_table
from halfstep.training.environment import choose_device
from halfstep.training.evaluate import Evaluation, evaluate, tokens_per_byte
from halfstep.training.optimizer import make_optimizer
from halfstep.training.step import Batch, LossSum

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Session:
    """A run in memory: model, optimizer and precision, data, and how far it has come."""

    config: TrainConfig
    device: torch.device
    data: PreparedData
    model: GPT
    precision: Precision
    loss_sum: LossSum
    """The model's loss, compiled where asked."""
    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Target tokens trained on."""

    @property
    def applied(self) -> int:
        """Steps that updated the weights."""
        return self.step - self.precision.skipped_total

    def micro_batches(self) -> list[Batch]:
        """The next step's batch, split for accumulation; a pure function of seed and step."""
        run = self.config.run
        size = run.batch_size // run.grad_accum
        return [
            batch(
                self.data.train,
                seed=run.seed,
                step=self.step,
                sequences=range(first, first + size),
                block_size=self.config.block_size,
            )
            for first in range(0, run.batch_size, size)
        ]

    def validation_batches(self) -> Iterable[Batch]:
        """What one evaluation measures: always the same windows."""
        run = self.config.run
        return validation_batches(
            self.data.validation,
            block_size=self.config.block_size,
            batch_size=run.batch_size // run.grad_accum,
            max_batches=run.eval_batches * run.grad_accum or None,
        )

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
            )
        finally:
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
        optimizer = optimizer_tensors(used, names) | rng_tensors(self.device)
        return Checkpoint(dict(self.precision.masters.items()), optimizer, state)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint, where: Path) -> None:
        """Go on from a checkpoint of a run with the same model and data, in any precision.

        With another policy than the checkpoint's, its exact fp32 masters become this policy's
        weights and the moments are converted to this policy's format.

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
        moments = {k: v for k, v in checkpoint.optimizer.items() if not k.startswith("rng/")}
        (used,) = self.precision.optimizers
        states = convert_optimizer_tensors(used, names, moments)
        saved = {**state["precision"], "masters": {}}
        self.precision.load_state_dict(saved, weights=checkpoint.weights)
        set_optimizer_state(used, states)
        load_rng_tensors(self.device, checkpoint.optimizer)
        self.step = int(state["step"])
        self.tokens = int(state["tokens"])


def open_session(config: TrainConfig, progress: Progress, *, resuming: bool = False) -> Session:
    """Prepare data and build the model; refuse here whatever cannot be run.

    Args:
        config: Of a new run, or the resolved one of a run to go on with.
        progress: Called while data is prepared.
        resuming: Weights will be restored, so ``run.init_from`` is not read again.

    Raises:
        HalfstepError: For data, configuration, precision or model folder that cannot be used. No
            run folder exists yet.
    """
    device = choose_device(config.run.device)
    require_support(parse_policy(config.precision), device)
    data = prepare(config.data, progress=progress)
    torch.manual_seed(config.run.seed)  # dropout; weights and batches have generators of their own
    model = _make_model(config, data.tokenizer, resuming).to(device)
    config = dataclasses.replace(config, model=model.config)
    if config.run.block_size > model.config.block_size:
        raise ConfigError(
            f"run.block_size={config.run.block_size} is over the {model.config.block_size} "
            f"positions of run.init_from={config.run.init_from}"
        )
    policy = parse_policy(config.precision)
    optimizer = make_optimizer(model, config.optimizer, policy, seed=config.run.seed)
    precision = Precision(policy, model, optimizer, on_nonfinite=config.run.on_nonfinite)
    loss_sum: LossSum = torch.compile(model.loss_sum) if config.run.compile else model.loss_sum
    session = Session(config, device, data, model.train(), precision, loss_sum)
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
