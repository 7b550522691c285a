"""Tuning a causal language model on texts, instructions or chats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.trainer.config.tasks import LMConfig
from halfstep.trainer.data.instructions.config import InstructionsConfig
from halfstep.trainer.data.instructions.instructions import read_instructions
from halfstep.trainer.data.instructions.packing import lm_batch
from halfstep.trainer.data.labelled.length_batches import EpochBatches
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.models.pretrained.lm import PretrainedLM, open_causal_lm
from halfstep.trainer.models.pretrained.lora import add_lora
from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer, require_vocabulary
from halfstep.trainer.run.model_folder import frozen_fingerprint, matrix_parameters, replace_folder
from halfstep.trainer.step import Batch, count_targets
from halfstep.trainer.tasks.task import Exported, Progress, Task, pinned
from halfstep.trainer.tasks.tuned_lm import (
    PROMPT_FILE,
    InstructionTokenizer,
    hold_weights_,
    measure,
    validation_batches,
)


class LMTask(Task):
    """A language model and its rows of tokens: a :class:`~halfstep.trainer.tasks.task.Task`."""

    keeps_best = True

    def __init__(self, config: LMConfig, world: World, progress: Progress) -> None:
        """Load model and tokenizer, read the data; arguments as of ``open_session``.

        Raises:
            HalfstepError: For data or a model folder that cannot be used.
        """
        run, choice = config.run, config.model
        if run.best_by not in ("", "loss"):
            raise ConfigError(f"run.best_by={run.best_by} is for classifiers; allowed: loss")
        if not choice.source:
            raise ConfigError(
                "model.source is empty; name a model to tune by --model: a folder, or a hub name"
            )
        config, trust = pinned(config, world)
        choice = config.model
        self.model: PretrainedLM = open_causal_lm(
            choice.source,
            dropout=None if choice.dropout < 0 else choice.dropout,
            gradient_checkpointing=choice.gradient_checkpointing,
            **trust,
        )
        limit, length = self.model.max_length, config.data.max_length
        notes: list[str] = []
        if limit is not None and length > limit:
            if length != InstructionsConfig().max_length:
                raise ConfigError(
                    f"data.max_length={length} is over the {limit} positions of model.source="
                    f"{choice.source}; lower --max-length"
                )
            notes.append(f"rows have the model's {limit} positions")
            length = limit
            config = dataclasses.replace(
                config, data=dataclasses.replace(config.data, max_length=limit)
            )
        tokenizer = open_tokenizer(choice.source, max_length=length, model_limit=limit, **trust)
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
        self.identity: Mapping[str, str] = {
            "data": self.data.sha256,
            "tokenizer": tokenizer.fingerprint,
            "base model": frozen_fingerprint(self.model),  # of the weights as stored
        }
        world.require_same(self.identity)
        held = hold_weights_(self.model, config.precision)
        self.notes = [*notes, *self.data.notes, *([held] if held else [])]
        self._lengths = self.data.train_rows.lengths
        self._batches = EpochBatches(self._lengths, run.batch_size, run.seed)
        self.smallest_batch = len(self._lengths) // self._batches.steps_per_epoch
        self.config: LMConfig = config.resolved(self._batches.steps_per_epoch)
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
        """Number of tokens of the batch that the loss counts."""
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
        run = self.config.run
        batches = validation_batches(
            self.data.dev_rows,
            run.batch_size // run.grad_accum,
            self.tokenizer.wrapped.pad_id,
            run.eval_batches * run.grad_accum,
            judge.rank,
            judge.ranks,
        )
        return measure(batches, judge, str(self.config.precision))

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and how prompts are written."""
        self.tokenizer.wrapped.save(folder / "tokenizer")
        about = {
            "format": self.data.format,
            "template": self.data.template,
            "base_model": self.identity["base model"],
        }
        (folder / PROMPT_FILE).write_text(json.dumps(about, indent=1), encoding="utf-8")

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the best state: the adapter, or the whole model."""

        def write(empty: Path) -> None:
            self.model.save_(empty, exported().weights)
            self.tokenizer.wrapped.save(empty)

        replace_folder(folder / "model", write)
        what = "adapter" if self.config.model.lora_r else "model"
        return f"{what} in {folder / 'model'}"
