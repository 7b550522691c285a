"""Trains a GPT on text, and uses trained ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer import part
from halfstep.trainer.checkpoint import (
    EXPORTED,
    exported,
    folders_of,
    load_checkpoint,
    reached,
)
from halfstep.trainer.config.tasks import Evaluating, Exporting, Generating, TrainConfig
from halfstep.trainer.data.batches import batch, require_block, validation_batches
from halfstep.trainer.data.corpus import (
    PreparedData,
    Tokenizer,
    load_tokenizer,
    prepare,
    token_file,
)
from halfstep.trainer.data.records import find_sources
from halfstep.trainer.models import IGNORE_INDEX, GPTConfig
from halfstep.trainer.models.gpt import GPT, generate
from halfstep.trainer.step import Batch, Evaluation, Judge, evaluate, perplexity
from halfstep.trainer.tasks.task import Task, Trained, share_of, shortened


class TextTask(Task):
    """Trains a language model on windows of a token file; see :class:`~.task.Task`."""

    keeps_best = False

    def __init__(self, config: TrainConfig, world: World, layout: Layout) -> None:
        """Prepare the data and build the model; for arguments see ``open_session``."""
        self.data: PreparedData = world.first_on_machine(lambda: prepare(config.data))
        data, run = self.data, config.run
        self.identity: Mapping[str, str] = {
            "training data": data.train.sha256,
            "validation data": data.validation.sha256,
            "tokenizer": data.tokenizer.fingerprint,
        }
        world.require_same(self.identity)
        shape = _with_vocabulary(config, data.tokenizer)
        with torch.device("meta" if layout.shard > 1 else "cpu"):  # no rank needs the whole then
            self.model = GPT(shape, seed=run.seed)
        warmup = min(config.schedule.warmup_steps, run.max_steps)
        self.notes = shortened(config.schedule.warmup_steps, warmup)
        schedule = dataclasses.replace(config.schedule, warmup_steps=warmup)
        self.config = dataclasses.replace(config, model=shape, schedule=schedule)
        self.smallest_batch = run.batch_size
        for tokens in (data.train, data.validation):
            require_block(tokens, config.block_size)  # here, not at the first step

    def summary(self) -> str:
        """Describe the run by its numbers of parameters and training tokens."""
        count = sum(p.numel() for p in self.model.parameters())
        return f"{count:,} parameters, {self.data.train.count:,} training tokens"

    def laid_out_(self, device: torch.device) -> None:
        """Draw the weights of a model that was made without any."""
        if self.model.wte.weight.is_meta:
            self.model.to_empty(device=device)
            self.model.init_weights_(torch.Generator().manual_seed(self.config.run.seed))

    def batch_size(self, step: int) -> int:
        """Return the number of sequences, which is the same in every step."""
        return self.config.run.batch_size

    def batch(self, step: int, rows: range) -> Batch:
        """Return (tokens, targets), int64 (B, T): windows at positions drawn by seed and step."""
        return batch(
            self.data.train,
            seed=self.config.run.seed,
            step=step,
            sequences=rows,
            block_size=self.config.block_size,
        )

    def tokens(self, step: int) -> int:
        """Return the tokens of a step's batch, the same number in every step."""
        return self.config.run.batch_size * self.config.block_size

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure the loss on the same validation windows every time."""
        batches = self._validation(judge.rank, judge.ranks)
        return evaluate(batches, judge, self.data.validation.density)

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder/tokenizer``."""
        self.data.tokenizer.save(folder / "tokenizer")

    def _validation(self, rank: int, ranks: int) -> Iterable[Batch]:
        """Yield this rank's rows of each validation batch."""
        run = self.config.run
        whole = validation_batches(
            self.data.validation,
            block_size=self.config.block_size,
            batch_size=run.batch_size // run.grad_accum,
            max_batches=run.eval_batches * run.grad_accum or None,
        )
        for tokens_BT, targets_BT in whole:
            rows = share_of(len(tokens_BT), rank, ranks)
            if rows:
                here = slice(rows.start, rows.stop)
                yield tokens_BT[here], targets_BT[here]
            else:  # forwards may be collective, so this rank runs a row that does not count
                yield tokens_BT[:1], torch.full_like(targets_BT[:1], IGNORE_INDEX)


class TrainedText(Trained):
    """A model from a run of ``train``."""

    model: GPT
    tokenizer: Tokenizer

    def load(self) -> None:
        """Load the newest checkpoint of a run in fp32."""
        folders = folders_of(self.config.run, self.path)
        found, lost = reached(folders)
        if not found:
            raise lost or CheckpointError(f"{folders[0]}: no checkpoint has been written")
        checkpoint = load_checkpoint(found[-1], kinds=EXPORTED)
        weights = exported(checkpoint).weights
        self.tokenizer = load_tokenizer(self.path / "tokenizer")
        if checkpoint.state["made_with"]["tokenizer"] != self.tokenizer.fingerprint:
            raise CheckpointError(
                f"{self.path / 'tokenizer'} is not the tokenizer of the run: it is damaged or was "
                "replaced; copy it again from where it is whole"
            )
        self.model = GPT(_with_vocabulary(self.config, self.tokenizer))
        self.model.load_state_dict(weights)

    def generate(self, use: Generating) -> str:
        """Return the prompt and its continuation; without a prompt, start a new document."""
        self.open(use)
        tokenizer = self.tokenizer
        end = tokenizer.end_of_text
        ids = tokenizer.encode(use.prompt) or (tokenizer.encode("\n") if end is None else [end])
        with torch.no_grad(), self.around():
            ids = generate(self.model, ids, stop_token=end, **use.drawing)
        return tokenizer.decode([i for i in ids if i != end])

    def evaluate(self, use: Evaluating) -> tuple[str, dict[str, Any]]:
        """Measure loss, perplexity and bits per byte on the validation text, or on ``--data``.

        Returns text and values.
        """
        self.open(use)
        config = self.config
        if use.data:
            tokens = token_file(find_sources(use.data), self.tokenizer)
        else:
            data = dataclasses.replace(config.data, tokenizer=str(self.path / "tokenizer"))
            tokens = prepare(data).validation
        batches = validation_batches(
            tokens,
            block_size=config.block_size,
            batch_size=use.batch_size,
            max_batches=use.max_batches or None,
        )
        judge = Judge(self.model.loss_sum, self.around, self.device)
        found = evaluate(batches, judge, tokens.density)
        values = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "bits_per_byte": found.bits_per_byte,
            "tokens": found.targets,
            "precision": str(self.policy),
        }
        text = (
            f"loss {found.loss:.4f} nats per token, perplexity {values['perplexity']:.2f}, "
            f"{found.bits_per_byte:.4f} bits per byte, on {found.targets:,} tokens in {self.policy}"
        )
        return text, values

    def export(self, use: Exporting) -> str:
        """Write the newest checkpoint, with its tokenizer, as a Hugging Face folder."""
        self.load()
        save = part("trainer.models.causal_lm:save_gpt2")
        with part("trainer.models.pretrained:new_folder")(
            Path(use.output), self.config.precision
        ) as empty:
            save(self.model, empty)
            self.tokenizer.save(empty)
        count = sum(p.numel() for p in self.model.parameters())
        return f"{use.output}: {count:,} parameters in fp32"


def _with_vocabulary(config: TrainConfig, tokenizer: Tokenizer) -> GPTConfig:
    size = tokenizer.vocab_size
    if config.model.vocab_size not in (0, size):
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer has {size} ids; leave "
            "model.vocab_size at 0 to follow it"
        )
    return dataclasses.replace(config.model, vocab_size=size)
