"""Fine-tunes causal language models on texts, instructions or chats, and uses tuned ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World
from halfstep.errors import ConfigError, PrecisionError
from halfstep.files import read_json
from halfstep.precision.casting.cast import add_regions_
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import place
from halfstep.trainer.config.tasks import Evaluating, Generating, LMConfig
from halfstep.trainer.data.batches import dealt, evaluation_shares
from halfstep.trainer.data.instructions import (
    lm_batch,
    prompt_ids,
    read_instructions,
)
from halfstep.trainer.models.causal_lm import (
    PretrainedLM,
    add_lora,
    generate_ids,
    open_adapted_lm,
    open_causal_lm,
)
from halfstep.trainer.models.pretrained import PretrainedTokenizer, open_tokenizer
from halfstep.trainer.step import Batch, Evaluation, Judge, mean_loss, perplexity
from halfstep.trainer.tasks.epochs import FinetuneTask, frozen_fingerprint, model_folder
from halfstep.trainer.tasks.task import Trained

PROMPT_FILE = "prompt.json"
"""File of a run folder with the prompt template and a hash of the base that adapters belong to."""


class LMTask(FinetuneTask):
    """A language model and its rows of tokens: a :class:`~halfstep.trainer.tasks.task.Task`."""

    config: LMConfig
    model: PretrainedLM
    by_block = True  # its loss hooks the head, which would end the graph

    def __init__(self, config: LMConfig, world: World, layout: Layout) -> None:
        """Load model and tokenizer, read the data; for arguments see ``open_session``."""
        choice = config.model
        self.model = open_causal_lm(
            choice.source,
            gradient_checkpointing=choice.gradient_checkpointing,
            mapped=layout.shard > 1,
        )
        limit, data = self.model.max_length, config.data
        self.notes = []
        if limit is not None and data.max_length > limit:
            data = dataclasses.replace(data, max_length=limit)
            config = dataclasses.replace(config, data=data)
            self.notes.append(f"rows have the model's {limit} positions")
        self.tokenizer = open_tokenizer(choice.source, max_length=data.max_length, model=self.model)
        self._packing = self.model.keeps_documents_apart()
        self.data = read_instructions(data, self.tokenizer, config.run.seed, packing=self._packing)
        if choice.lora_r:
            self.leaves = "adapter"
            self.model = add_lora(
                self.model,
                choice.lora_r,
                choice.lora_alpha,
                choice.lora_dropout,
                choice.lora_targets,
                seed=config.run.seed,
            )
        self.identity: Mapping[str, str] = {
            "data": self.data.sha256,
            "tokenizer": self.tokenizer.fingerprint,
            "base model": frozen_fingerprint(self.model),  # before hold_weights_ may convert them
        }
        world.require_same(self.identity)
        self.notes += self.data.notes
        self.deal(config, self.data.train_rows.lengths)

    def laid_out_(self, device: torch.device) -> None:
        """Hold the weights as the policy wants them."""
        held = hold_weights_(self.model, cast(PrecisionPolicy, self.config.precision))
        self.notes += [held] if held else []

    def summary(self) -> str:
        """Describe the run by its numbers of parameters, tokens and rows."""
        parameters = list(self.model.parameters())
        every = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        rows = self.data.train_rows
        return (
            f"{trained:,} of {every:,} parameters, {rows.learned_tokens:,} tokens to learn in "
            f"{len(rows):,} rows ({rows.efficiency:.0%} full)"
        )

    def batch(self, step: int, rows: range) -> Batch:
        """Return (ids_BT, targets_BT, positions_BT), all int64, of some rows of a step's batch."""
        indices = self.batches.indices(step)[rows.start : rows.stop]
        return lm_batch(self.data.train_rows, indices, self.tokenizer.pad_id)

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure loss and perplexity on every validation row once."""
        rows = self.data.dev_rows
        make = partial(lm_batch, rows, pad_id=self.tokenizer.pad_id)
        batches = dealt(self.shares(rows.lengths, judge), make, 1)
        return measured_loss(batches, judge, str(self.config.precision))

    def save(self, folder: Path) -> None:
        """Write the tokenizer and the prompt settings."""
        super().save(folder)
        about = {
            "template": self.data.template,
            "packing": self._packing,
            "base_model": self.identity["base model"],
        }
        (folder / PROMPT_FILE).write_text(json.dumps(about, indent=1), encoding="utf-8")


def measured_loss(batches: Iterator[Batch], judge: Judge, precision: str) -> Evaluation:
    """Measure loss and perplexity; the text also names the precision."""
    loss, targets = mean_loss(batches, judge)
    text = (
        f"validation loss {loss:.4f} nats per token, perplexity {perplexity(loss):.3f} on "
        f"{targets:,} tokens in {precision}"
    )
    return Evaluation(loss=loss, targets=targets, score=-loss, text=text)


# The dtype of a model's weights while it is tuned under a policy.


def hold_weights_(model: PretrainedLM, policy: PrecisionPolicy) -> str:
    """Make trained weights fp32; keep a frozen base as stored if the policy computes in its dtype.

    Any other base, such as an fp16 base under ``bf16-mixed``, is held in fp32, which is exact:
    operations would otherwise mix two 16-bit dtypes, or compute in another than the policy's.
    Returns a note for the user, which may be empty.

    Raises:
        PrecisionError: If the policy's weights are 16-bit and would round the frozen base.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    stored = model.stored_dtype
    if not frozen:
        model.float()
        return ""
    if policy.param_dtype != torch.float32:
        if policy.param_dtype != stored:
            compute = dtype_name(policy.compute_dtype)
            raise PrecisionError(
                f"precision {policy} keeps all weights in {dtype_name(policy.param_dtype)}, and "
                f"would round the frozen base, which is stored in {dtype_name(stored)}; use "
                f"{compute}-mixed, or --lora-r 0 to train all weights"
            )
        return ""
    if stored == torch.float32 or (stored == policy.compute_dtype and not policy.rules):
        return ""
    model.float()
    return (
        f"the frozen base is stored in {dtype_name(stored)} and held in fp32, as precision "
        f"{policy} does not compute in {dtype_name(stored)} throughout"
    )


# Using the model of a finished run.


class TrainedLM(Trained):
    """A model or adapter from a run of ``finetune lm``."""

    model: PretrainedLM
    tokenizer: PretrainedTokenizer
    template: str
    """The prompt template of training."""
    packing: bool
    """Whether several documents share a row; padding gives the same loss."""

    def load(self) -> None:
        """Load the best state: the whole model, or the adapter on its base model."""
        config, folder = self.config, model_folder(self.path, self.config.COMMAND)
        about = read_json(self.path / PROMPT_FILE)
        self.template, base = about["template"], about["base_model"]
        self.packing = about.get("packing", False)
        if config.model.lora_r:
            self.model = open_adapted_lm(folder)
            if frozen_fingerprint(self.model) != base:
                raise ConfigError(
                    f"{self.path}: the base model {config.model.source} has changed since the run, "
                    "and the adapter belongs to what it was; put it back"
                )
        else:
            self.model = open_causal_lm(folder)
        length = config.data.max_length
        self.tokenizer = open_tokenizer(folder, max_length=length, model=self.model)

    def cast_(self) -> None:
        """Give the weights their dtypes in training, and compute as there."""
        hold_weights_(self.model, self.policy)
        if self.policy.param_dtype == torch.float32 and self.policy.casts == "op":
            add_regions_(place(self.policy, self.model))  # a frozen base stays in 16 bits
        else:
            super().cast_()

    def generate(self, use: Generating) -> str:
        """Return the answer to a prompt, or without a template the prompt and what follows it."""
        self.open(use)
        tokenizer = self.tokenizer
        ids = prompt_ids(use.prompt, tokenizer, self.template)
        end = tokenizer.end_of_text()
        ids = ids or [end]  # in pretraining, every document follows this token
        ends = [end, *tokenizer.end_of_turn()]
        with self.around():
            written = generate_ids(self.model, ids, ends=ends, **use.drawing)
        decode = tokenizer.decode
        if self.template == "plain":
            return decode([*ids, *written])
        # decoded with the prompt, as a tokenizer may drop the space before the first word
        return decode([*ids, *written])[len(decode(ids)) :].strip()

    def evaluate(self, use: Evaluating) -> tuple[str, dict[str, Any]]:
        """Measure loss and perplexity on the run's validation records, or on ``--data``."""
        self.open(use)
        data = self.config.data
        if use.data:
            data = dataclasses.replace(data, train=use.data, dev=use.data)
        seed = self.config.run.seed
        rows = read_instructions(data, self.tokenizer, seed, packing=self.packing).dev_rows
        shares = evaluation_shares(rows.lengths, use.batch_size, use.max_batches)
        batches = dealt(shares, partial(lm_batch, rows, pad_id=self.tokenizer.pad_id), 1)
        judge = Judge(self.model.loss_sum, self.around, self.device)
        found = measured_loss(batches, judge, str(self.policy))
        values = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "tokens": found.targets,
            "precision": str(self.policy),
        }
        return found.text.removeprefix("validation "), values
