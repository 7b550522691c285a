"""Tuning a causal language model on texts, instructions or chats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.data.batches import IGNORED
from halfstep.data.instructions import read_instructions
from halfstep.data.length_batches import EpochBatches, evaluation_batches
from halfstep.data.packing import lm_batch
from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.models.lora import add_lora
from halfstep.models.pretrained_lm import PretrainedLM, open_causal_lm
from halfstep.models.pretrained_tokenizer import open_tokenizer, require_vocabulary
from halfstep.training.evaluate import Evaluation, Judge, mean_loss
from halfstep.training.finetune_config import LMConfig
from halfstep.training.instruction_tokenizer import InstructionTokenizer
from halfstep.training.model_folder import (
    frozen_fingerprint,
    matrix_parameters,
    replace_folder,
    spread,
)
from halfstep.training.step import Batch, count_targets
from halfstep.training.task import Progress

TEMPLATE_FILE = "prompt.json"
"""In a run folder: how prompts are written, for generation."""


class LMTask:
    """A language model and its rows of tokens: a :class:`~halfstep.training.task.Task`."""

    keeps_best = True

    def __init__(self, config: LMConfig, world: World, progress: Progress) -> None:
        """Load model and tokenizer, read the data; arguments as of ``open_session``.

        Raises:
            HalfstepError: For data or a model folder that cannot be used.
        """
        run, choice = config.run, config.model
        if not choice.source:
            raise ConfigError(
                "model.source is empty; name a model to tune by --model: a folder, or a hub name"
            )
        trust: dict[str, Any] = {
            "trust_remote_code": choice.trust_remote_code,
            "revision": choice.revision,
        }
        self.model: PretrainedLM = open_causal_lm(
            choice.source, gradient_checkpointing=choice.gradient_checkpointing, **trust
        )
        limit = self.model.max_length
        if limit is not None and config.data.max_length > limit:
            raise ConfigError(
                f"data.max_length={config.data.max_length} is over the {limit} positions of "
                f"model.source={choice.source}; lower --max-length"
            )
        tokenizer = open_tokenizer(choice.source, model_limit=limit, **trust)
        require_vocabulary(self.model, tokenizer)
        self.tokenizer = InstructionTokenizer(tokenizer, choice.source)
        self.data = read_instructions(config.data, self.tokenizer, run.seed)
        if config.data.packing:
            self.model.check_packing()
        if choice.lora_r:
            self.model = add_lora(
                self.model,
                choice.lora_r,
                choice.lora_alpha,
                choice.lora_dropout,
                choice.lora_targets,
                seed=run.seed,
            )
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # what is trained is fp32; a frozen base stays as stored
                parameter.data = parameter.data.float()
        self.notes = list(self.data.notes)
        self.identity: Mapping[str, str] = {
            "data": self.data.sha256,
            "tokenizer": tokenizer.fingerprint,
            "base model": frozen_fingerprint(self.model),
        }
        world.require_same(self.identity)
        self._lengths = self.data.train_rows.lengths
        self._batches = EpochBatches(self._lengths, run.batch_size, run.seed)
        self.smallest_batch = len(self._lengths) // self._batches.steps_per_epoch
        self.config: LMConfig = config.resolved(self._batches.steps_per_epoch)
        if self.config.run.best_by not in ("", "loss"):
            raise ConfigError(
                f"run.best_by={self.config.run.best_by} is for classifiers; allowed: loss"
            )
        self._matrices = matrix_parameters(self.model)

    def summary(self) -> str:
        """Parameters, rows and tokens."""
        parameters = list(self.model.parameters())
        every = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        rows = self.data.train_rows
        return (
            f"{trained:,} of {every:,} parameters, {rows.learned_tokens:,} tokens to learn in "
            f"{len(rows):,} rows ({rows.efficiency:.0%} full)"
        )

    def batch_size(self, step: int) -> int:
        """Rows of the step; those of an epoch differ by one at most."""
        return len(self._batches.indices(step))

    def batch(self, step: int, rows: range) -> Batch:
        """(ids_BT, targets_BT, positions_BT), int64."""
        indices = self._batches.indices(step)[rows.start : rows.stop]
        return lm_batch(self.data.train_rows, indices, self.tokenizer.wrapped.pad_id)

    def targets(self, batch: Batch) -> float:
        """Tokens to learn."""
        return count_targets(batch)

    def tokens(self, step: int) -> int:
        """Tokens of the step's rows without padding."""
        return int(self._lengths[self._batches.indices(step)].sum())

    def flops(self, tokens: float) -> float:
        """Two operations a matrix weight and token forward, as many for each gradient."""
        frozen = self.config.model.lora_r > 0  # no gradients of the base's weights
        return (4.0 if frozen else 6.0) * self._matrices * tokens

    def evaluate(self, judge: Judge) -> Evaluation:
        """Loss and perplexity on every validation row once."""
        loss, targets = mean_loss(self._validation(judge.rank, judge.ranks), judge)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        text = (
            f"validation loss {loss:.4f} nats per token, perplexity {perplexity:.3f} on "
            f"{targets:,} tokens in {self.config.precision}"
        )
        return Evaluation(loss=loss, targets=targets, score=-loss, text=text)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and how prompts are written."""
        self.tokenizer.wrapped.save(folder / "tokenizer")
        about = {"format": self.data.format, "template": self.data.template}
        (folder / TEMPLATE_FILE).write_text(json.dumps(about), encoding="utf-8")

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Nothing: metrics.jsonl has it."""

    def finish(self, folder: Path, weights: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write the best state: the adapter, or the whole model."""

        def write(empty: Path) -> None:
            self.model.save_(empty, weights())
            self.tokenizer.wrapped.save(empty)

        replace_folder(folder / "model", write)
        what = "adapter" if self.config.model.lora_r else "model"
        return f"{what} in {folder / 'model'}"

    def _validation(self, rank: int, ranks: int) -> Iterator[Batch]:
        """A rank's batches: every ``ranks``-th; each rank gets as many."""
        run, rows = self.config.run, self.data.dev_rows
        batches = evaluation_batches(rows.lengths, run.batch_size // run.grad_accum)
        batches = spread(batches, run.eval_batches * run.grad_accum)
        for first in range(0, len(batches), ranks):
            mine = first + rank
            counts = mine < len(batches)
            indices = batches[mine] if counts else np.zeros(1, dtype=np.int64)
            ids_BT, targets_BT, positions_BT = lm_batch(
                rows, indices, self.tokenizer.wrapped.pad_id
            )
            if not counts:  # all ranks run as often: a row that does not count
                targets_BT = torch.full_like(targets_BT, IGNORED)
            yield ids_BT, targets_BT, positions_BT
